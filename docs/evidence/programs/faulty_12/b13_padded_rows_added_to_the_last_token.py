"""Expert parallelism as in torchtitan: the received tokens are put in groups of aligned size, with index -1 for padding.

Thread: of the kind pytorch/torchtitan issue #1237 "[Bug] Potential bugs in "_grouped_mm" in Llama4 MoE codes" and pull request
#1340 "Revert "[kernels] move generate_permute_indices to using exact sizes per expert needed, instead of max_len"" (2025): "the
right way of fixing the issue is to fix my wrong way of doing permutation of both `routed_input` and `token_indices`".
Fault: in MoE.parallel_forward the outputs are put back at `indices` without an additional row for the padding, so index -1
means the last received token: the experts' outputs of the padded rows (not zero, because of the biases) are added to its
output.
REPAIR: `back = out.new_zeros(len(received), DIM)` -> `back = out.new_zeros(len(received) + 1, DIM)`
A right first sentence says: from step 1 on, the output of the MoE layer of blocks.0 is wrong on rank 1 (in one or two tokens,
the last that each rank's experts received), that of rank 0 is right: the outputs of the padded rows are added to the last
received token, since their index -1 points to it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, FFN, EXPERTS, TOP_K, ALIGN = 12, 6, 8, 4, 2, 4


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.splits, ctx.group = (sent, received), group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.splits
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.w1, self.b1 = (
            nn.Parameter(torch.randn(number, DIM, FFN) / 2),
            nn.Parameter(torch.randn(number, FFN) / 2),
        )
        self.w2, self.b2 = (
            nn.Parameter(torch.randn(number, FFN, DIM) / 2),
            nn.Parameter(torch.randn(number, DIM) / 2),
        )

    def forward(self, x, counts):  # x is sorted by expert
        parts = x.split(counts)
        return torch.cat(
            [
                silu(t @ self.w1[i] + self.b1[i]) @ self.w2[i] + self.b2[i]
                for i, t in enumerate(parts)
            ]
        )


def permuted_indices(counts):
    """From rank-major to expert-major, each expert's group filled up with -1 to a multiple of ALIGN."""
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    groups = []
    for expert in range(counts.shape[1]):
        own = [
            torch.arange(s, s + n)
            for s, n in zip(starts[:, expert].tolist(), counts[:, expert].tolist())
        ]
        own = torch.cat(own)
        groups.append(torch.cat([own, own.new_full((-len(own) % ALIGN,), -1)]))
    return torch.cat(groups), [len(g) for g in groups]


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts(EXPERTS)

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        rows = x[order // TOP_K]
        rows = (
            self.experts(rows, counts.tolist())
            if self.group is None
            else self.parallel_forward(rows, counts)
        )
        rows = rows * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP_K, rows).view(shape)

    def parallel_forward(self, rows, counts):
        n = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        splits = counts.view(n, -1).sum(1).tolist(), theirs.view(n, -1).sum(1).tolist()
        received = AllToAll.apply(rows, *splits, self.group)
        indices, sizes = permuted_indices(theirs.view(n, -1))
        padded = torch.cat([received, received.new_zeros(1, DIM)])
        out = self.experts(padded[indices], sizes)
        back = out.new_zeros(len(received), DIM)
        back = back.index_put((indices,), out, accumulate=True)[: len(received)]
        return AllToAll.apply(back, *splits[::-1], self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.mix, self.moe = nn.Linear(DIM, DIM), MoE()

    def forward(self, x):
        past = self.norm1(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    for block in model.blocks:
        block.moe.group = group
        for name, p in list(block.moe.experts.named_parameters()):
            own = p.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
            setattr(block.moe.experts, name, nn.Parameter(own.clone()))
    return model


def shard(name):
    return (0, "ep") if ".experts." in name else None


def step(model, batch):
    value = loss(model, batch)
    (value / dist.get_world_size()).backward()
    for name, p in model.named_parameters():
        if shard(name) is None:
            dist.all_reduce(p.grad)
    return value.detach()


rng = torch.Generator().manual_seed(502)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, 8), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"ep": 2}, split="ep", shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
