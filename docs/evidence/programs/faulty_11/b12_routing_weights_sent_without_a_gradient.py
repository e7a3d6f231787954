"""Experts on several ranks that weight their outputs themselves: tokens and routing weights are sent by all-to-all.

Thread: of the kind pytorch/torchtitan pull request #989 "[DeepSeek] Add all_to_all_single impl; Enable backward" (2025) and
facebookresearch/fairscale pull request #137 "[feat] moe: add all_to_all backward support" (2020).
Fault: in DistributedExperts.forward, the routing weights are sent by exchange, which autograd does not follow, so the router
learns from the balance loss alone.
REPAIR: `exchange(weights[order], *splits)` -> `Exchange.apply(weights[order], *splits)`
A right first sentence says: the forward pass and the loss agree; the gradient of moe.router.weight (and of what lies below moe)
is wrong on both ranks, those of the experts agree: the routing weights go through an all-to-all without a backward pass in
DistributedExperts, so nothing of the cross entropy reaches the router.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, one_hot

import titanlite

VOCAB, DIM, EXPERTS, BALANCE = 10, 6, 4, 0.05


def exchange(x, to_send, to_receive):
    out = x.new_empty(sum(to_receive), *x.shape[1:])
    dist.all_to_all_single(out, x.detach().contiguous(), to_receive, to_send)
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to_send, to_receive):
        ctx.splits = to_receive, to_send
        return exchange(x, to_send, to_receive)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.splits), None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, weight):
        return self.w2(gelu(self.w1(x))) * weight[:, None]


class Experts(nn.ModuleDict):
    def __init__(self):
        super().__init__({str(i): Expert() for i in range(EXPERTS)})

    def forward(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for key, expert in self.items():
            rows = (chosen == int(key)).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows], weights[rows]))
        return out


class DistributedExperts(nn.ModuleDict):
    def __init__(self, experts):
        own = EXPERTS // dist.get_world_size()
        first = own * dist.get_rank()
        super().__init__({str(i): experts[str(i)] for i in range(first, first + own)})

    def forward(self, x, weights, chosen):
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        splits = [c.view(dist.get_world_size(), -1).sum(1).tolist() for c in (counts, received)]
        tokens = Exchange.apply(x[order], *splits)
        scales = exchange(weights[order], *splits)
        local = torch.arange(len(self)).repeat(dist.get_world_size()).repeat_interleave(received)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.values()):
            rows = (local == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(tokens[rows], scales[rows]))
        out = Exchange.apply(out, *splits[::-1])
        return torch.zeros_like(x).index_add(0, order, out)


class SwitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.max(-1)
        self.choices = one_hot(chosen, EXPERTS).sum(0)
        self.probabilities = probabilities
        return self.experts(x, weights, chosen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.past = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.norm, self.moe, self.head = nn.LayerNorm(DIM), SwitchLayer(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (x + torch.tanh(self.past(x.cumsum(1)))).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def balance(layer, choices, tokens):
    return EXPERTS * (choices / tokens * layer.probabilities.mean(0)).sum()


def loss(model, batch):
    value = cross_entropy(model(batch["tokens"]), batch["labels"].flatten())
    return value + BALANCE * balance(model.moe, model.moe.choices, batch["labels"].numel())


def parallel(mesh):
    model = Model()
    model.moe.experts = DistributedExperts(model.moe.experts)
    return model


def step(model, batch):
    value = cross_entropy(model(batch["tokens"]), batch["labels"].flatten())
    choices = model.moe.choices.clone()
    dist.all_reduce(choices)
    tokens = batch["labels"].numel() * dist.get_world_size()
    value = value + BALANCE * balance(model.moe, choices, tokens)
    value.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


rng = torch.Generator().manual_seed(407)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (8, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
