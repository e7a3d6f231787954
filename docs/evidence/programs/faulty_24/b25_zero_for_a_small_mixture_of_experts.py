"""A small mixture of experts on four ranks: two expert parallel pairs, ZeRO partitions for dense and expert weights.

Thread: deepspeedai/DeepSpeed pull request #2058 "Wrong partition_id while copying fp32_params -> fp16 params in Z2 for
MoE" (2022): "This leads to only a fraction of the non-expert parameters being trained."
Fault: ZeroOptimizer.step copies the updated master into the piece of partition_id, which is left over from the loop
before and is the rank within the last part's group, the expert data parallel one; the dense weights have four pieces,
and where the two ranks differ the rank's own piece stays as it was and is gathered like that.
REPAIR: `part.pieces[partition_id].copy_(part.master)` -> `part.pieces[dist.get_rank(part.group)].copy_(part.master)`
A right first sentence says: gradients and masters are right, but of the dense parameters only some pieces of the flat
vector are updated, as the masters are copied back with the rank of the expert data parallel group for partition id
instead of the rank of the data parallel group.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import titanlite

VOCAB, WIDTH, HIDDEN, LENGTH, ROWS, EXPERTS = 26, 16, 12, 8, 8, 4


def build_adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return ReturnTokens.apply(grad, ctx.group), None


class ReturnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        return GatherTokens.apply(grad, ctx.group), None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)
        self.group, self.ranks, self.rank = None, 1, 0

    def shard(self, mesh):
        self.up, self.down = (
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            for p in (self.up, self.down)
        )
        self.group, self.ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def forward(self, x, weights):
        if self.group is not None:
            x, weights = (GatherTokens.apply(part, self.group) for part in (x, weights))
        y = F.silu(x @ local(self.up)) @ local(self.down)
        y = torch.einsum("te,etd->td", weights.chunk(self.ranks, dim=1)[self.rank], y)
        return y if self.group is None else ReturnTokens.apply(y, self.group)


class SmallMixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCAB, WIDTH), nn.RMSNorm(WIDTH)
        self.mix, self.router = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, VOCAB)

    def forward(self, words):
        x = self.words(words)
        x = torch.tanh(self.mix(torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], dim=-1)))
        tokens = self.norm(x).flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(len(tokens), EXPERTS).scatter(1, chosen, scores)
        return self.head(x + self.experts(tokens, weights).view_as(x))


class Part:
    """The parameters of one data parallel group as a flat vector, one piece of it with a master on each rank."""

    def __init__(self, parameters, group):
        self.parameters, self.group, self.master = parameters, group, None

    def flatten(self, tensors):
        flat, size = (
            torch.cat([local(t).flatten() for t in tensors]),
            dist.get_world_size(self.group),
        )
        return list(F.pad(flat, (0, -len(flat) % size)).chunk(size))

    def gather(self):
        dist.all_gather(
            self.pieces, self.pieces[dist.get_rank(self.group)].clone(), group=self.group
        )
        sizes = [local(p).numel() for p in self.parameters]
        for p, values in zip(self.parameters, torch.cat(self.pieces)[: sum(sizes)].split(sizes)):
            local(p).copy_(values.view_as(local(p)))


class ZeroOptimizer(torch.optim.Optimizer):
    def __init__(self, parts):
        super().__init__([{"params": part.parameters} for part in parts], {})
        self.parts, self.inner = parts, None

    def reduce_gradients(self):
        for part in self.parts:
            for p in part.parameters:
                dist.all_reduce(local(p.grad), group=part.group)

    @torch.no_grad()
    def step(self, closure=None):
        for part in self.parts:
            partition_id = dist.get_rank(part.group)
            part.pieces = part.flatten([p.detach() for p in part.parameters])
            if part.master is None:
                part.master = nn.Parameter(part.pieces[partition_id].clone())
            part.master.grad = part.flatten([p.grad for p in part.parameters])[partition_id]
        self.inner = self.inner or build_adam([part.master for part in self.parts])
        self.inner.step()
        for part in self.parts:
            part.pieces[partition_id].copy_(part.master)
            part.gather()


def plain():
    return SmallMixture()


def parallel(mesh):
    model, dp = SmallMixture(), mesh["edp", "ep"]._flatten("dp")
    model.experts.shard(mesh["ep"])
    dense = [p for p in model.parameters() if not isinstance(p, DTensor)]
    experts = Part(list(model.experts.parameters()), mesh.get_group("edp"))
    return model, ZeroOptimizer([Part(dense, dp.get_group()), experts]), dp


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, optimizer, dp = built
    value = loss(model, batch.chunk(dp.size())[dp.get_local_rank()]) / dp.size()
    value.backward()
    optimizer.reduce_gradients()
    dist.all_reduce(value.detach(), group=dp.get_group())
    return value.detach()


generator = torch.Generator().manual_seed(2058)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, ranks={"edp": 2, "ep": 2}, optimizer=build_adam
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
