"""An image classifier with sparse experts (V-MoE): the patches of every image and the experts are cut over the same ranks.

Thread: pytorch/torchtitan pull request #3604 "[Bug] Fix MoE SP token combine indices" (2026): tokens of a shard of the sequence
got their place in the whole batch by an offset per rank, which is right for batches of a single sequence only.
Fault: SparseMlp.places numbers the patches of a rank (all images flattened) and adds the rank times their number; the results
of the experts are written into a buffer that is ordered by image first, so they reach patches of other images.
REPAIR: `return own + rank * len(own)` -> `return own + (own // length * (dist.get_world_size(self.group) - 1) + rank) * length`
A right first sentence says: a patch's index in the whole batch is taken as its local index plus an offset per rank, although the
patches are cut within each image; with several images the experts' results are added to the wrong patches (of wrong images).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

PATCHES, PIXELS, WIDTH, EXPERTS, CLASSES, LAYERS, ROWS = 8, 12, 10, 4, 5, 2, 3


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class SumAndCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=1), None


class SparseMlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict()
        for index in range(EXPERTS):
            up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.experts[str(index)] = nn.Sequential(up, nn.GELU(), down)

    def keep_own(self, group):
        self.group = group
        for index in range(EXPERTS):
            if index % dist.get_world_size(group) != dist.get_rank(group):
                del self.experts[str(index)]

    def places(self, rows, length):
        """Where the patches of this rank lie in the flattened batch of whole images."""
        own = torch.arange(rows * length)
        if self.group is None:
            return own
        rank = dist.get_rank(self.group)
        return own + rank * len(own)

    def forward(self, x):
        rows, length, _ = x.shape
        weight, kind = self.router(x).softmax(-1).flatten(0, 1).max(-1)
        x, place = x.flatten(0, 1), self.places(rows, length)
        if self.group is not None:
            x, weight, kind, place = (Gather.apply(t, self.group) for t in (x, weight, kind, place))
        y = torch.zeros_like(x)
        for index, module in self.experts.items():
            chosen = (kind == int(index)).nonzero().squeeze(1)
            result = module(x[chosen]) * weight[chosen].unsqueeze(1)
            y = y.index_add(0, place[chosen], result)
        y = y.view(rows, -1, WIDTH)
        return y if self.group is None else SumAndCut.apply(y, self.group)


class VisionMoe(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.3)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(SparseMlp() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def distribute(self, group):
        self.group = group
        for mlp in self.mlps:
            mlp.keep_own(group)
        return self

    def own(self, x, dim):
        if self.group is None:
            return x
        return x.chunk(dist.get_world_size(self.group), dim)[dist.get_rank(self.group)]

    def forward(self, patches):
        x = self.embed(self.own(patches, 1)) + self.own(self.positions, 0)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        pooled = x.tanh().sum(1)
        if self.group is not None:
            total = pooled.detach().clone()
            dist.all_reduce(total, group=self.group)
            pooled = pooled + (total - pooled.detach())
        return self.head(pooled / PATCHES)

    def reduce_gradients(self):
        shared = [self.positions, *self.embed.parameters(), *self.norms.parameters()]
        for p in shared + [mlp.router.weight for mlp in self.mlps]:
            dist.all_reduce(p.grad, group=self.group)


def plain():
    return VisionMoe()


def parallel(mesh):
    return VisionMoe().distribute(mesh.get_group("ep"))


def loss(model, batch):
    patches, labels = batch
    return F.cross_entropy(model(patches), labels)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    model.reduce_gradients()
    return value.detach()


generator = torch.Generator().manual_seed(3604)


def images():
    patches = torch.randn(ROWS, PATCHES, PIXELS, generator=generator, dtype=torch.float64)
    return patches, torch.randint(0, CLASSES, (ROWS,), generator=generator)


batches = [images() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split=lambda batch, mesh: batch, ranks={"ep": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
