"""Mixture of experts with all-to-all: the tokens that come back are permuted once more, not put back in place.

Thread: of the kind "MoE unpermute: argsort of the indices instead of the indices" (ports of Megatron-LM's permute and
unpermute, DeepSpeed-MoE from scratch, questions about NVIDIA/TransformerEngine#1336), 2023 to 2025.
Wrong: tokens are sorted by expert with x[order] and dispatched. The results come back in that order, and are combined
as back[order], which applies the permutation twice. The inverse is needed, back[order.argsort()].
PLACE: moe, forward pass, the combination after the second all-to-all (experts and router agree)
KIND: tokens returned to wrong positions: the permutation is applied again instead of its inverse
REPAIR: `return back[order]` -> `return back[order.argsort()]`
EXPECT: in the forward pass, moe is the first module whose output differs, on all ranks: its rows are right but at wrong
places (a permutation of the rank's tokens): the results of the experts are put back by the order of dispatch instead
of its inverse. The router and what the experts compute are right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

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
        return self.down(torch.relu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def compute(self, x, choice):
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            mine = (choice == int(e)).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine]))
        return out

    def transform(self, x, choice):
        return self.compute(x, choice)

    def forward(self, x):
        flat = x.flatten(0, 1)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        return (gate[:, None] * self.transform(flat, choice)).view_as(x)


class ParallelMoe(Moe):
    def transform(self, x, choice):
        n = dist.get_world_size()
        order = choice.argsort(stable=True)
        send = torch.bincount(choice // (EXPERTS // n), minlength=n)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        send, receive = send.tolist(), receive.tolist()
        there = AllToAll.apply(x[order], send, receive)
        there = self.compute(there, exchange(choice[order], send, receive))
        back = AllToAll.apply(there, receive, send)
        return back[order]


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
    model, rank, n = Model(ParallelMoe), mesh.get_local_rank("ep"), mesh["ep"].size()
    for e in range(EXPERTS):
        if e // (EXPERTS // n) != rank:
            del model.moe.experts[str(e)]
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(15)


def draw():
    return torch.randint(VOCAB, (4, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
