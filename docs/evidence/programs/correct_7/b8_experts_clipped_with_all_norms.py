"""Expert parallelism with all-to-all, uneven numbers of tokens, and clipping by the norm of all experts.

Thread: https://github.com/hpcaitech/ColossalAI/issues/2192 "[BUG]: Gradient clip not reducing gradient norm w/ MoE
expert parallel", 2022-12-24, and https://github.com/NVIDIA/Megatron-LM/issues/785, 2024-04-19, done right.
Correct: tokens are put back by the inverse permutation. Expert gradients are not reduced over the ranks, since the
experts see all tokens, but divided by their number. The squared norm of the experts is added up over ep.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, EXPERTS, LIMIT = 16, 8, 4, 0.2


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
        gates, choices = self.router(flat).softmax(-1).topk(2, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        out = self.transform(flat.repeat_interleave(2, 0), choices.flatten())
        return (gates[..., None] * out.unflatten(0, (-1, 2))).sum(1).view_as(x)


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
        return torch.empty_like(back).index_copy(0, order, back)


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


def clip(model):
    squares = {name: p.grad.square().sum() for name, p in model.named_parameters()}
    experts = sum(square for name, square in squares.items() if ".experts." in name)
    shared = sum(square for name, square in squares.items() if ".experts." not in name)
    if len(model.moe.experts) < EXPERTS:
        dist.all_reduce(experts)
    norm = (shared + experts).sqrt()
    for p in model.parameters():
        p.grad.mul_((LIMIT / norm).clamp(max=1.0))
    return norm


generator = torch.Generator().manual_seed(36)


def draw():
    return torch.randint(VOCAB, (4, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, clip=clip, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
