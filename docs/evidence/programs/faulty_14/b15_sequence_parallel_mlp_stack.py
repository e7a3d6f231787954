"""A stack of tensor-parallel MLP blocks whose norms and residual stream are split over the sequence, as Megatron does it.

Thread: awslabs/slapo pull request #23 "[Schedule] Fix linear bias after row sharding weight (#10)" (2023). After the
bias of the row-sharded layer was moved behind the reduction, its gradient under sequence parallelism was 1/TP of the
right one, although the bias was added only once.
Fault: RowLinear adds its bias after the reduce-scatter, to this rank's part of the sequence, so a rank's bias
gradient covers only its own tokens; unlike the norms', it is not summed over the tensor-parallel group. The copies of
the bias drift apart.
REPAIR: `nn.Parameter(linear.bias.detach().clone())` -> `sum_gradient(nn.Parameter(linear.bias.detach().clone()), group)`
A right first sentence says: The bias of the row-parallel `down` layers is added to the sequence shard after the
reduce-scatter, so its gradient is a partial sum over the rank's own tokens, and it is never all-reduced over the tp
group (only the norms' gradients are).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import titanlite

VOCAB, WIDTH, HIDDEN, LAYERS = 18, 16, 32, 3


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def own_part(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def reduce_scattered(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return own_part(x, group)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_part(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """partial: whether the ranks go on with different work, so that their gradients are to be added."""

    @staticmethod
    def forward(ctx, x, group, partial):
        ctx.group, ctx.partial = group, partial
        return gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        back = reduce_scattered if ctx.partial else own_part
        return back(grad, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad, ctx.group), None


def sum_gradient(parameter, group):
    def hook(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    parameter.register_hook(hook)
    return parameter


class ColumnLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(size, 0)[rank].clone())

    def forward(self, x):
        return F.linear(Gather.apply(x, self.group, True), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return ReduceScatter.apply(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.group = None

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.group is not None:
            x = Scatter.apply(x, self.group)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group is not None:
            x = Gather.apply(x, self.group, False)
        return self.head(x)


def plain():
    return Model()


def parallel(mesh):
    model = Model()
    model.group = group = mesh.get_group("tp")
    for block in model.blocks:
        block.up = ColumnLinear(block.up, group)
        block.down = RowLinear(block.down, group)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                sum_gradient(parameter, group)
    return model


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def make_batches(count=3, rows=3, length=8):
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (rows, length + 1), generator=generator) for _ in range(count)]
    return [
        {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()} for text in texts
    ]


batches = make_batches()
arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
