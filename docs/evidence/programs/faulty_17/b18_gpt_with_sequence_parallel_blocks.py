"""A GPT with tensor parallel blocks by hand and sequence parallel regions around them, in the manner of Megatron.

Thread: awslabs/slapo pull request #23 "Fix linear bias after row sharding weight" (2023): with sequence parallelism "I'm not
sure why linear2.bias.grad is 1/TP of the original one"; also NVIDIA/Megatron-LM pull request #236 (2022), where the
all-reduce of these biases' gradients is explained.
Fault: RowParallelLinear adds its whole bias after the reduce-scatter, to this rank's part of the sequence, but
allreduce_sequence_parallel_grads sums the gradients of the norms only; the biases keep the gradient of the rank's own positions.
REPAIR: `if "norm" in name:` -> `if "norm" in name or name.endswith(("proj.bias", "down.bias")):`
A right first sentence says: the biases of the row-parallel layers (proj.bias, down.bias) are used on sequence shards, and their
gradients are not summed over the tensor parallel ranks, so each rank applies only the gradient of its own part of the sequence.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS = 19, 12, 4, 8, 2


def gather_sequence(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def own_part(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def reduce_scatter_sequence(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return own_part(x, group)


class Region(torch.autograd.Function):
    """One communication in the forward pass, another in the backward pass."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group), None, None, None


def enter_tensor_parallel(x, group):
    """From sequence shards to whole sequences, in front of a column-parallel layer."""
    return Region.apply(x, group, gather_sequence, reduce_scatter_sequence)


def leave_tensor_parallel(x, group):
    """From partial sums of whole sequences to sequence shards, behind a row-parallel layer."""
    return Region.apply(x, group, reduce_scatter_sequence, gather_sequence)


def shard(parameter, dim, group):
    return nn.Parameter(
        parameter.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()
    )


class ColumnParallelLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.weight, self.bias = shard(linear.weight, 0, group), shard(linear.bias, 0, group)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        self.weight, self.bias, self.group = shard(linear.weight, 1, group), linear.bias, group

    def forward(self, x):
        return leave_tensor_parallel(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def parallelize(self, group):
        self.group = group
        for name in ("q", "k", "v", "up"):
            setattr(self, name, ColumnParallelLinear(getattr(self, name), group))
        for name in ("proj", "down"):
            setattr(self, name, RowParallelLinear(getattr(self, name), group))

    def enter(self, x):
        return x if self.group is None else enter_tensor_parallel(x, self.group)

    def forward(self, x):
        y = self.enter(self.norm1(x))
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.enter(self.norm2(x)))))


class GPT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def parallelize(self, group):
        self.group = group
        for block in self.blocks:
            block.parallelize(group)
        return self

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        if self.group is not None:
            x = Region.apply(x, self.group, own_part, gather_sequence)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group is not None:
            x = Region.apply(x, self.group, gather_sequence, own_part)
        return self.head(x)


def allreduce_sequence_parallel_grads(model):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            dist.all_reduce(parameter.grad, group=model.group)


def plain():
    return GPT()


def parallel(mesh):
    return GPT().parallelize(mesh.get_group("tp"))


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    allreduce_sequence_parallel_grads(model)
    return value.detach()


generator = torch.Generator().manual_seed(23)
batches = [torch.randint(0, VOCAB, (3, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
