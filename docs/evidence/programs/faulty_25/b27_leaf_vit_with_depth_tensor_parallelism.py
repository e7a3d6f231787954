"""A small ViT for leaf diseases with AxoNN's tensor parallelism: two tensor ranks, each with shards on two depth ranks.

Thread: axonn-ai/axonn pull request #57 "More communication optimizations", with its "convergence bug fix for depth tp -
all-reduce bias and layer norm weights across the depth tp dimension" (2024; first tried in #55): depth ranks have their
own rows of the batch; the shards of weights are gathered and their gradients reduce-scattered.
Fault: sync_gradients_depth_parallel skips what is_tensor_parallel, that is the weights in depth shards, but also the
biases of column layers (cut over tp, whole on both depth ranks), whose gradients stay those of half the batch.
REPAIR: `"is_tensor_parallel", False):` -> `"is_tensor_parallel", False) and param.dim() > 1:`
A right first sentence says: the gradients of the column parallel layers' biases (qkv.bias, fc1.bias) aren't summed over
depth, because sync_gradients_depth_parallel skips all tensor parallel parameters.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

PATCHES, PIXELS, WIDTH, HEADS, CLASSES, ROWS = 6, 10, 16, 4, 5, 8


def all_reduce(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class ForwardGatherBackwardReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard.detach().contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(len(grad) // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class AllReduceOneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward = group, in_forward
        return all_reduce(x, group) if in_forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.in_forward else all_reduce(grad, ctx.group), None, None


class TensorParallelLinear(nn.Module):
    """Column parallel, or row parallel if transposed; the weight is cut once more over depth."""

    def __init__(self, whole, mesh, transpose):
        super().__init__()
        self.tp, self.depth = mesh.get_group("tp"), mesh.get_group("depth")
        tp, depth = dist.get_rank(self.tp), dist.get_rank(self.depth)
        weight = whole.weight.detach().chunk(2, int(transpose))[tp].chunk(2)[depth].clone()
        bias = whole.bias.detach() if transpose else whole.bias.detach().chunk(2)[tp]
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias.clone())
        self.weight.is_tensor_parallel, self.bias.is_tensor_parallel = True, not transpose
        self.transpose = transpose

    def forward(self, x):
        weight = ForwardGatherBackwardReduceScatter.apply(self.weight, self.depth)
        if self.transpose:
            return AllReduceOneWay.apply(F.linear(x, weight), self.tp, True) + self.bias
        return F.linear(AllReduceOneWay.apply(x, self.tp, False), weight, self.bias)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        y = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4))
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.positions = nn.Linear(PIXELS, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.blocks(self.patch(images) + self.positions.weight)
        return self.head(self.norm(x).mean(1))


def sync_gradients_depth_parallel(model, group):
    for param in model.parameters():
        if getattr(param, "is_tensor_parallel", False):
            continue
        dist.all_reduce(param.grad, group=group)


def parallel(mesh):
    model = ViT()
    for block in model.blocks:
        for name in ("qkv", "proj", "fc1", "fc2"):
            whole, transpose = getattr(block, name), name in ("proj", "fc2")
            setattr(block, name, TensorParallelLinear(whole, mesh, transpose))
    return model, mesh["depth"]


def shard(name):
    if name.endswith(("qkv.weight", "fc1.weight")):
        return [(0, "tp"), (0, "depth")]
    if name.endswith(("proj.weight", "fc2.weight")):
        return [(1, "tp"), (0, "depth")]
    return (0, "tp") if name.endswith(("qkv.bias", "fc1.bias")) else None


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["disease"])


def step(built, batch):
    model, depth = built
    value = loss(model, batch)
    (value / depth.size()).backward()
    sync_gradients_depth_parallel(model, depth.get_group())
    return value.detach()


generator, batches = torch.Generator().manual_seed(57), []
for _ in range(3):
    disease = torch.randint(CLASSES, (ROWS,), generator=generator)
    noise = torch.randn(ROWS, PATCHES, PIXELS, generator=generator)
    batches.append({"images": noise + disease.view(-1, 1, 1) / 3, "disease": disease})

arguments = ViT, parallel
options = dict(batches=batches, loss=loss, step=step, shard=shard, split="depth")
options["ranks"] = {"depth": 2, "tp": 2}
options["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
