"""Context parallelism: the loss is multiplied by cp, but gradients are divided by dp only.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/906 "[BUG] wrong loss scaling when context
parallel is on", 2024-07-07.
Wrong: the factor cp belongs to a division of the summed gradients by dp * cp. They are divided by the
size of the group without cp. The reported loss is right.
A right diagnosis says: all gradients are 2 times too large, and 2 is the degree of cp (or of dp, which
is equal here): they are multiplied by it once too often. The loss agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 20, 16


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def parallel(mesh):
    return GPT(), mesh


def loss_func(model, batch, cp_group):
    logits = model(batch["x"]).flatten(0, 1)
    total = cross_entropy(logits, batch["y"].flatten(), reduction="sum")
    tokens = torch.tensor(float(batch["y"].numel()))
    dist.all_reduce(tokens, group=cp_group)
    reported = total.detach() / tokens
    dist.all_reduce(reported, group=cp_group)
    return total / tokens * dist.get_world_size(cp_group), reported


def step(built, batch):
    model, mesh = built
    value, reported = loss_func(model, batch, mesh.get_group("cp"))
    value.backward()
    for p in model.parameters():
        p.grad /= mesh["dp"].size()
        dist.all_reduce(p.grad)
    dist.all_reduce(reported, group=mesh.get_group("dp"))
    return reported / mesh["dp"].size()


generator = torch.Generator().manual_seed(15)
batches = [
    {name: torch.randint(VOCAB, (4, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2, "cp": 2}, split={"dp": 0, "cp": 1})
    print(titanlite.compare(GPT, parallel, step=step, **options))
