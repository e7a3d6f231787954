"""Experts on different ranks under a hand-written data parallelism that averages the gradients of all parameters.

Thread: facebookresearch/fairscale issue #871 "[MoE] How to do expert sharding?" (2021): p.expert is set to True, "how is
p.expert used in DDP?", and facebookresearch/fairseq issue #4220 (2022).
Wrong: every rank has its own experts and marks their parameters with p.expert. average_gradients does not look at the
mark: it averages the gradient of expert 0 on rank 0 with that of expert 2 on rank 1, and so on.
PLACE: moe.experts.* (all experts), backward pass: average_gradients, on all ranks
KIND: gradients of different experts on different ranks summed with each other (all-reduce over the experts' ranks)
REPAIR: `dist.all_reduce(p.grad, group=group)` -> `getattr(p, "expert", False) or dist.all_reduce(p.grad, group=group)`
EXPECT: the forward pass agrees; the gradients of moe.experts.* are wrong on all ranks and all others agree: the gradient
of each expert is the sum of its own and that of the expert at the same place on the other rank (0 with 2, 1 with 3),
since experts are all-reduced like the shared parameters. Do not reduce them over the ranks that hold other experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, EXPERTS = 16, 8, 4


def exchange(x, send, receive):
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send)
    return out


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        return exchange(x, send, receive)

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.sizes
        return exchange(gradient, receive, send), None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def compute(self, x, choice):
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            mine = (choice == int(e)).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine]))
        return out

    def forward(self, x):
        flat = x.flatten(0, 1)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        return (gate[:, None] * self.compute(flat, choice)).view_as(x)


class LocalExperts(Moe):
    """Keeps the experts of this rank; the tokens go to them and back by all-to-all."""

    def keep(self, rank, n):
        for e in range(EXPERTS):
            if e // (EXPERTS // n) != rank:
                del self.experts[str(e)]
        for p in self.experts.parameters():
            p.expert = True

    def compute(self, x, choice):
        n, order = dist.get_world_size(), choice.argsort(stable=True)
        send = torch.bincount(choice // (EXPERTS // n), minlength=n)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        send, receive = send.tolist(), receive.tolist()
        there = AllToAll.apply(x[order], send, receive)
        there = super().compute(there, exchange(choice[order], send, receive))
        back = AllToAll.apply(there, receive, send)
        return torch.empty_like(back).index_copy(0, order, back)


class Model(nn.Module):
    def __init__(self, moe=Moe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm1, self.dense = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.norm2, self.moe = nn.LayerNorm(DIM), moe()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.tanh(self.dense(self.norm1(x.cumsum(1))))
        return self.head(x + self.moe(self.norm2(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def average_gradients(model, group=None):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def parallel(mesh):
    model = Model(LocalExperts)
    model.moe.keep(mesh.get_local_rank("world"), mesh["world"].size())
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    average_gradients(model)
    return value


generator = torch.Generator().manual_seed(114)


def draw():
    return torch.randint(VOCAB, (6, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"world": 2}, split="world")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
