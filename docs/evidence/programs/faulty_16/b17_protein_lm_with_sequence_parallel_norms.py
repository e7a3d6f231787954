"""A masked language model of proteins with Megatron style tensor and sequence parallel layers on two ranks.

Thread: EleutherAI/gpt-neox pull request #1259 "Fix LayerNorm all reduce gradient hook" (2024): besides the point where it
is registered, the hook that reduces the LayerNorm gradients over the tensor parallel ranks is changed to sum them in the
sequence dimension instead of averaging them.
Fault: the hook in register_sequence_parallel_hooks divides the all-reduced gradients of the norms and of the row-parallel
biases by the number of tensor parallel ranks. Each rank's gradient covers its own part of the sequence, so the sum is the
gradient.
REPAIR: `scale = 1 / dist.get_world_size(group)` -> `scale = 1`
A right first sentence says: the gradients of the sequence parallel parameters (LayerNorms and row-parallel biases) are
averaged over the tp ranks instead of summed, so they are half (1 / tp size) of what they should be.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

RESIDUES, MASK, WIDTH, HEAD, LENGTH = 20, 20, 16, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ProteinLM(nn.Module):
    enter = leave = staticmethod(lambda x: x)

    def __init__(self):
        super().__init__()
        self.residues = nn.Embedding(RESIDUES + 1, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, RESIDUES)

    def forward(self, tokens):
        x = self.enter(self.residues(tokens) + self.positions.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(self.leave(self.norm(x)))


def own_part(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def all_gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def reduce_scatter(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return own_part(x, group)


def sequence_function(forward_op, backward_op):
    class SequenceFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward_op(x, group)

        @staticmethod
        def backward(ctx, grad):
            return backward_op(grad, ctx.group), None

    return SequenceFunction


SplitSequence = sequence_function(own_part, all_gather)
JoinSequence = sequence_function(all_gather, own_part)
GatherInput = sequence_function(all_gather, reduce_scatter)
ScatterOutput = sequence_function(reduce_scatter, all_gather)


class ParallelLinear(nn.Module):
    def __init__(self, linear, group, weight_dim):
        super().__init__()
        self.group = group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, weight_dim)[rank].clone())
        bias = linear.bias.detach()
        self.bias = nn.Parameter((bias.chunk(size)[rank] if weight_dim == 0 else bias).clone())


class ColumnParallelLinear(ParallelLinear):
    def forward(self, x):
        return F.linear(GatherInput.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(ParallelLinear):
    def forward(self, x):
        return ScatterOutput.apply(F.linear(x, self.weight), self.group) + self.bias


def register_sequence_parallel_hooks(model, group):
    scale = 1 / dist.get_world_size(group)

    def reduce_gradient(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.mul_(scale)

    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("out.bias", "down.bias")):
            parameter.register_post_accumulate_grad_hook(reduce_gradient)


def tensor_parallel(model, group):
    model.enter = lambda x: SplitSequence.apply(x, group)
    model.leave = lambda x: JoinSequence.apply(x, group)
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            setattr(block, name, ColumnParallelLinear(getattr(block, name), group, 0))
        for name in ("out", "down"):
            setattr(block, name, RowParallelLinear(getattr(block, name), group, 1))
    register_sequence_parallel_hooks(model, group)
    return model


def plain():
    return ProteinLM()


def parallel(mesh):
    return tensor_parallel(ProteinLM(), mesh.get_group("tp"))


def loss(model, batch):
    tokens, masked = batch
    return F.cross_entropy(model(tokens.masked_fill(masked, MASK))[masked], tokens[masked])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(1259)
batches = []
for _ in range(3):
    tokens = torch.randint(0, RESIDUES, (4, LENGTH), generator=generator)
    order = torch.rand(4, LENGTH, generator=generator).argsort(dim=1)
    batches.append((tokens, order < 3))

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
