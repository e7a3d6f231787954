"""A mixture of experts whose expert groups run across tensor-parallel and data-parallel ranks ("parallel folding").

Thread: NVIDIA/Megatron-LM issue #1459 "[QUESTION]Why can't Expert Parallelism (EP) and Context Parallelism (CP) be
enabled simultaneously?" (2025): attention and experts of one layer have rank groups of their own, drawn from the same
ranks.
Correct: attention is cut by heads over two ranks, with its places gathered before and scattered after; the experts are
spread over all four ranks, and every rank sends the tokens of its own piece of its own rows to them, sorted by expert.
The weights of attention see all places after the gather, so their gradients are added over data parallelism alone;
norms, embeddings, router and head see a piece, so theirs are added over all ranks; an expert has seen all its tokens
already. The loss is a sum divided by the tokens of the whole batch, so nothing is averaged. An expert without tokens
has zero gradients, not None.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)

import titanlite

VOCAB, WIDTH, HEADS, LAYERS, EXPERTS, HIDDEN, TOP = 32, 16, 4, 2, 8, 12, 2
LENGTH, ROWS = 10, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x, group):
        x = x if group is None else all_gather_tensor_autograd(x, 1, group)
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.o(y.transpose(1, 2).flatten(2))
        return y if group is None else reduce_scatter_tensor_autograd(y, "sum", 1, group)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def own_experts(self, x, counts):
        parts = x.split(counts)
        return torch.cat([F.silu(y @ a) @ b for y, a, b in zip(parts, self.w1, self.w2)])

    def dispatched(self, x, counts, group):
        """x is sorted by expert; counts are the rows of each."""
        if group is None:
            return self.own_experts(x, counts.tolist())
        size, theirs = dist.get_world_size(group), torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        theirs = theirs.view(size, -1)  # from each rank for each of my experts
        sent, received = counts.view(size, -1).sum(1).tolist(), theirs.sum(1).tolist()
        x = all_to_all_single_autograd(x, received, sent, group)
        expert = torch.arange(theirs.shape[1]).repeat(size).repeat_interleave(theirs.flatten())
        order = expert.argsort(stable=True)
        y = self.own_experts(x[order], theirs.sum(0).tolist())
        return all_to_all_single_autograd(y[order.argsort()], sent, received, group)

    def forward(self, x, group):
        tokens = x.flatten(0, 1)
        probabilities, chosen = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        y = self.dispatched(tokens[order // TOP], counts, group)
        y = y * probabilities.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // TOP, y).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, tp=None, ep=None):
        x = self.words(tokens)
        for i in range(LAYERS):
            x = x + self.attentions[i](self.norms[2 * i](x), tp)
            x = x + self.experts[i](self.norms[2 * i + 1](x), ep)
        return self.head(x)


def plain():
    return Model()


def cuts(name):
    if name.endswith((".w1", ".w2")):
        return [(0, "dp"), (0, "tp")]
    if ".o." in name:
        return (1, "tp")
    return (0, "tp") if name.startswith("attentions") else None


def parallel(mesh):
    model, groups = Model(), {"dp": mesh.get_group("dp"), "tp": mesh.get_group("tp")}
    for name, parameter in model.named_parameters():
        how = cuts(name) or []
        for dim, axis in [how] if isinstance(how, tuple) else how:
            parameter.data = parameter.data.chunk(2, dim)[mesh.get_local_rank(axis)].clone()
    return model, groups, dist.group.WORLD


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step(built, part):
    model, groups, world = built
    tokens, targets = part
    logits = model(tokens, groups["tp"], world)
    value = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    value = value / (ROWS * LENGTH)
    value.backward()
    for name, parameter in model.named_parameters():
        if not name.endswith((".w1", ".w2")):
            group = groups["dp"] if name.startswith("attentions") else world
            dist.all_reduce(parameter.grad, group=group)
    return value.detach()


generator = torch.Generator().manual_seed(1459)


def texts():
    words = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "tp": 1},
    ranks={"dp": 2, "tp": 2},
    shard=cuts,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
