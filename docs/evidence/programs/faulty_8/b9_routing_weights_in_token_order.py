"""Expert parallelism whose experts apply the routing weights: they are sent in token order, the tokens in expert order.

Thread: NVIDIA/Megatron-LM issue #1603 "The loss of deepep and alltoall not all same" (2025), of the kind "permuted_probs"
(the routing weights have to be permuted with the tokens before they are dispatched).
Wrong: the dispatcher sorts the tokens by expert and sends them. It sends the routing weights too, so that the experts
can multiply their hidden activations by them, but unsorted: a token meets another token's weight.
PLACE: moe, forward pass: the experts' routing weights (the router and the dispatched tokens are right)
KIND: routing weights dispatched without the permutation of the tokens
REPAIR: `AllToAll.apply(gates.flatten(), send, receive)` -> `AllToAll.apply(gates.flatten()[order], send, receive)`
EXPECT: in the forward pass, moe is the first module whose output differs, on all ranks, while its router agrees: within the
experts, gate and up agree and the input of down does not: it is multiplied by the routing weights of other tokens, since
the weights are sent in the order of the tokens, not in that of the dispatched tokens (sorted by expert). Permute them
like the tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, HIDDEN, EXPERTS, TOP = 16, 8, 16, 4, 2


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
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x, weight):
        return self.down(silu(self.gate(x)) * self.up(x) * weight[:, None])


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def compute(self, x, weights, choice):
        out = torch.zeros_like(x)
        for e, expert in self.experts.items():
            mine = (choice == int(e)).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine], weights[mine]))
        return out

    def transform(self, x, gates, choices):
        return self.compute(x, gates.flatten(), choices.flatten())

    def forward(self, x):
        flat = x.flatten(0, 1)
        gates, choices = self.router(flat).softmax(-1).topk(TOP, -1)
        out = self.transform(flat.repeat_interleave(TOP, 0), gates, choices)
        return out.unflatten(0, (-1, TOP)).sum(1).view_as(x)


class ParallelMoe(Moe):
    def transform(self, x, gates, choices):
        n, choice = dist.get_world_size(), choices.flatten()
        order = choice.argsort(stable=True)
        send = torch.bincount(choice // (EXPERTS // n), minlength=n)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        send, receive = send.tolist(), receive.tolist()
        tokens = AllToAll.apply(x[order], send, receive)
        weights = AllToAll.apply(gates.flatten(), send, receive)
        done = self.compute(tokens, weights, exchange(choice[order], send, receive))
        back = AllToAll.apply(done, receive, send)
        return torch.empty_like(back).index_copy(0, order, back)


class Model(nn.Module):
    def __init__(self, moe=Moe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.moe = nn.RMSNorm(DIM, eps=1e-6), moe()
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


generator = torch.Generator().manual_seed(113)


def draw():
    return torch.randint(VOCAB, (4, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
