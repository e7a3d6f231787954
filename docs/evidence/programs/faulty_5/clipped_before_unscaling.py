"""minGPT under DDP with a gradient scaler: the gradients are clipped while they still carry the loss scale.

Thread: https://github.com/pytorch/examples/issues/1196 "add scaler.unscale_(optimizer) before clip_grad_norm_"
(distributed/minGPT-ddp), 2023-10-27; also https://github.com/rwth-i6/returnn/pull/1595 (2024-07-22).
Wrong: the norm of the scaled gradients is 1024 times too large, so they are clipped in every step, to 1/1024 of the
threshold. scaler.unscale_ is called after the clipping.
EXPECT: all gradients are too small by one common factor on all ranks, their norm is 1/1024 of the clipping threshold:
they are clipped while they are still multiplied with the loss scale of 1024. The loss of step 1 agrees.
Unscale before clipping.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH, MAX_NORM = 11, 12, 6, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix = nn.Parameter(torch.randn(LENGTH, LENGTH) * 0.3)
        self.mlp = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))

    def forward(self, x):
        x = x + self.mix.tril() @ self.ln1(x)
        return x + self.mlp(self.ln2(x))


class MinGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.blocks = nn.Embedding(VOCAB, DIM), nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.wte(tokens)))


def loss(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def create_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def parallel(mesh):
    model = DistributedDataParallel(MinGPT(), process_group=mesh.get_group("dp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return model, create_optimizer(model.parameters()), scaler


def run_batch(built, batch):
    model, optimizer, scaler = built
    value = loss(model, batch)
    scaler.scale(value).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.unscale_(optimizer)
    scaler.update()
    return value.detach()


generator = torch.Generator().manual_seed(1196)
batches = [
    {n: torch.randint(VOCAB, (8, LENGTH), generator=generator) for n in ("tokens", "targets")}
    for _ in range(3)
]
arguments = MinGPT, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=run_batch, clip=clip)
options["optimizer"] = create_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
