"""ZeRO-1 with pipeline stages: the embedding and the output layer, which are tied, are trained apart.

Threads: https://github.com/NVIDIA/Megatron-LM/issues/844 "[BUG] Wrong embedding gradients with
distributed optimizer and shared embedding", 2024-05-28, which gives the cause; and
https://github.com/NVIDIA/Megatron-LM/issues/656 "[BUG] LM head weights get untied while training with
overlap", 2024-01.
Wrong: gradients are reduce-scattered over dp before the two copies' gradients are summed over pp. The
copies lie in different partitions of the stages' buffers, so sums over dp are added to gradients of
one rank of dp.
A right diagnosis says: only the gradient of embed.weight differs, and the copies of the two stages
have different gradients (or: parts of the batch are counted wrongly in it).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 20, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(index): whole.layers[index]})
        self.head = whole.head if index == 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)

    def shared(self):
        return self.embed.weight if isinstance(self.embed, nn.Embedding) else self.head.weight


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = Stage(GPT(), index)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, ScheduleGPipe(stage, 2, loss_fn=mean), mesh


def write(parameters, buffer):
    for p, values in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(values.view_as(p))


def finalize(module, mesh):
    group, n, rank = mesh.get_group("dp"), mesh["dp"].size(), mesh.get_local_rank("dp")
    parameters = list(module.parameters())
    buffer = torch.cat([p.grad.flatten() for p in parameters])
    total = buffer.clone()
    dist.all_reduce(total, group=group)  # reduce-scatter: only the rank's partition is kept
    buffer.chunk(n)[rank].copy_(total.chunk(n)[rank] / n)
    write(parameters, buffer)
    dist.all_reduce(module.shared().grad, group=mesh.get_group("pp"))
    buffer = torch.cat([p.grad.flatten() for p in parameters])
    for owner, partition in enumerate(buffer.chunk(n)):  # each partition as its owner updates it
        dist.broadcast(partition, group=group, group_src=owner)
    write(parameters, buffer)


def step(built, batch):
    module, schedule, mesh = built
    losses = []
    inputs = [batch["x"]] if mesh.get_local_rank("pp") == 0 else []
    schedule.step(*inputs, target=batch["y"], losses=losses)
    finalize(module, mesh)
    return torch.stack(losses).mean() if losses else None


def loss(model, batch):
    return mean(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(17)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2, "pp": 2}, split="dp", step=step)
    rename = {"head.weight": "embed.weight"}
    print(titanlite.compare(GPT, parallel, rename=rename, **options))
