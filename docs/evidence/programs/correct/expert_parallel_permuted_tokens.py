"""Expert parallelism with two experts a rank: tokens are sorted by expert and exchanged.

Thread: https://github.com/facebookresearch/fairscale/issues/741 "Question about All-to-All Dispatch &
Combination implementation in MOELayer" (more experts than devices), 2021-07-15.
Right: rows are permuted by expert, sent with uneven split sizes, sorted again by local expert,
computed, and sent back. Experts' gradients are sums over all ranks' tokens, divided by the world
size as DDP does for the others.
Must not be accused: the order of rows inside moe, experts that see other ranks' tokens, experts that
are not in DDP.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

EXPERTS, DIM, VOCAB = 4, 16, 20


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits):
        ctx.splits = out_splits, in_splits
        out = x.new_empty(sum(out_splits), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_splits, in_splits)
        return out

    @staticmethod
    def backward(ctx, grad):
        out_splits, in_splits = ctx.splits
        return AllToAll.apply(grad, in_splits, out_splits), None, None


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, DIM, 24) * 0.2)
        self.w2 = nn.Parameter(torch.randn(count, 24, DIM) * 0.2)

    def forward(self, x, counts):
        rows = x.split(counts)
        return torch.cat([silu(r @ w1) @ w2 for r, w1, w2 in zip(rows, self.w1, self.w2)])


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts(EXPERTS)

    def forward(self, x):
        probs, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        rows = x[order]
        if not dist.is_initialized():
            rows = self.experts(rows, counts.tolist())
        else:
            n = dist.get_world_size()
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            in_splits = counts.view(n, -1).sum(1).tolist()
            out_splits = received.view(n, -1).sum(1).tolist()
            rows = AllToAll.apply(rows, out_splits, in_splits)
            local = torch.arange(EXPERTS // n).repeat(n).repeat_interleave(received)
            by_expert = local.argsort(stable=True)
            per_expert = torch.bincount(local, minlength=EXPERTS // n).tolist()
            rows = self.experts(rows[by_expert], per_expert)
            rows = rows[by_expert.argsort()]
            rows = AllToAll.apply(rows, in_splits, out_splits)
        return torch.zeros_like(x).index_copy(0, order, rows) * probs.unsqueeze(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.moe = nn.LayerNorm(DIM), MoE()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def parallel(mesh):
    model, n, rank = Model(), mesh.size(), mesh.get_local_rank()
    for p in model.moe.experts.parameters():
        p.data = p.data.chunk(n)[rank].clone()
        p.register_hook(lambda grad: grad / n)
    names = [f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    return DDP(model)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


generator = torch.Generator().manual_seed(13)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"ep": 2}, split="ep")
    print(titanlite.compare(Model, parallel, **options))
