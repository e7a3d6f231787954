"""Expert parallelism with gradient clipping: every rank clips by the norm of its own experts and the shared weights.

Thread: https://github.com/hpcaitech/ColossalAI/issues/2192 "[BUG]: Gradient clip not reducing gradient norm w/ MoE
expert parallel" ("different ranks would have different gradient norms"), 2022-12-24.
Wrong: clip_grad_norm_ is called with the rank's parameters: the replicated ones and half of the experts. The norm lacks
the other rank's experts. It is too small, differs on the ranks, and so the replicated weights are clipped differently.
PLACE: gradient clipping (clip), the norm; the gradients before it agree
KIND: gradient norm without the experts of the other ranks: the local norm is not reduced over ep
REPAIR: `total = shared + own` -> `total = shared + reduced(own)`
EXPECT: the gradients agree before clipping, the gradient norm does not: on each rank it lacks the experts that the
other rank has, so it is too small and differs on the ranks. Sum the squared norm of the expert gradients over ep before
the root.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, EXPERTS, LIMIT = 12, 8, 4, 0.2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def mix(self, x, weights):
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            out = out + weights[..., int(e), None] * expert(x)
        return out

    def gates(self, x):
        values, index = self.router(x).softmax(-1).topk(2, -1)
        return torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, index, values)

    def forward(self, x):
        return self.mix(x, self.gates(x))


class ParallelMoe(Moe):
    def forward(self, x):
        return Sum.apply(self.mix(Copy.apply(x), Copy.apply(self.gates(x))))


class Model(nn.Module):
    def __init__(self, moe=Moe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.moe = nn.LayerNorm(DIM), moe()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, rank = Model(ParallelMoe), mesh.get_local_rank("ep")
    for e in range(EXPERTS):
        if e // (EXPERTS // 2) != rank:
            del model.moe.experts[str(e)]
    return model


def reduced(square):
    square = square.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(square)
    return square


def clip(model):
    own, shared = torch.zeros(()), torch.zeros(())
    whole = len(model.moe.experts) == EXPERTS
    for name, p in model.named_parameters():
        square = p.grad.square().sum()
        if ".experts." in name and not whole:
            own = own + square
        else:
            shared = shared + square
    if whole:
        total = shared
    else:
        total = shared + own
    norm = total.sqrt()
    for p in model.parameters():
        p.grad.mul_((LIMIT / norm).clamp(max=1.0))
    return norm


generator = torch.Generator().manual_seed(11)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, clip=clip, ranks={"ep": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
