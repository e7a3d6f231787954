"""A regressor of weather stations under a ZeRO-3 engine by hand, with ZeRO++'s secondary shards (hpZ) within a node.

Thread: deepspeedai/DeepSpeed pull request #4288 "Keep hpz secondary tensor in forward pass" (2023), which comments out
invalidate_secondary_tensor in _post_step; its reviewer asks: "Could the weight update by step not invalidate the
cached secondary tensor values?" (Pull request #7707 finds dirty secondary tensors, with an abnormal loss.)
Fault: partition_secondary keeps a secondary shard that exists, and Engine.train_batch never invalidates them, so from
the second step on the backward pass gathers the weights from before the first update; the forward has the new ones.
REPAIR: `self.global_steps += 1` -> `self.global_steps += 1; self.invalidate_secondary_tensors()`
A right first sentence says: from step 2 on the backward pass multiplies by stale weights (those of the first step, kept
in the secondary shards), so the gradients of the layers' inputs are wrong; the forward pass and step 1 are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

FEATURES, WIDTH, HIDDEN, OUTPUTS, ROWS, BLOCKS = 12, 16, 32, 4, 16, 3


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.stem(x)
        for up, down in zip(self.up, self.down):
            x = x + down(F.silu(up(F.rms_norm(x, (WIDTH,)))))
        return self.head(F.rms_norm(x, (WIDTH,)))


def all_gather_rows(piece, group):
    pieces = [torch.empty_like(piece) for _ in range(group.size())]
    dist.all_gather(pieces, piece.contiguous(), group=group)
    return torch.cat(pieces)


class _PartitionedLinear(torch.autograd.Function):
    """Forward gathers primary shards from all ranks, backward secondary ones within the node."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        whole = all_gather_rows(weight, layer.world)
        layer.partition_secondary(whole)
        ctx.layer, ctx.x = layer, x
        return F.linear(x, whole, all_gather_rows(bias, layer.world))

    @staticmethod
    def backward(ctx, grad_output):
        x, layer = ctx.x, ctx.layer
        whole = all_gather_rows(layer.secondary, layer.node)
        grad_weight = layer.reduce_scatter(grad_output.t() @ x)
        grad_bias = layer.reduce_scatter(grad_output.sum(0))
        return grad_output @ whole, grad_weight, grad_bias, None


def own_rows(tensor, group):
    return tensor.detach().chunk(group.size())[group.rank()].clone()


class PartitionedLinear(nn.Module):
    def __init__(self, linear, world, node):
        super().__init__()
        self.world, self.node, self.secondary = world, node, None
        self.weight = nn.Parameter(own_rows(linear.weight, world))
        self.bias = nn.Parameter(own_rows(linear.bias, world))

    def partition_secondary(self, whole):
        if self.secondary is None:
            self.secondary = own_rows(whole, self.node)

    def reduce_scatter(self, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self.world)
        return own_rows(gradient / self.world.size(), self.world)

    def forward(self, x):
        return _PartitionedLinear.apply(x, self.weight, self.bias, self)


class Engine:
    """Owns the partitioned module; the gradients of its micro-batches pile up in the shards."""

    def __init__(self, module, world, node, gradient_accumulation_steps=2):
        self.module, self.world, self.layers = module, world, []
        self.accumulation, self.global_steps = gradient_accumulation_steps, 0
        for name in [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]:
            self.layers.append(PartitionedLinear(module.get_submodule(name), world, node))
            module.set_submodule(name, self.layers[-1])

    def invalidate_secondary_tensors(self):
        for layer in self.layers:
            layer.secondary = None

    def load_module_state(self, state):
        for name, parameter in self.module.named_parameters():
            parameter.data.copy_(own_rows(state[name], self.world))
        self.invalidate_secondary_tensors()

    def train_batch(self, batch):
        total = 0.0
        parts = (tensor.chunk(self.accumulation) for tensor in batch)
        for stations, measured in zip(*parts):
            value = F.huber_loss(self.module(stations), measured) / self.accumulation
            value.backward()
            total = total + value.detach()
        self.global_steps += 1
        return total


def plain():
    return Regressor()


def parallel(mesh):
    module, world = Regressor(), mesh._flatten("world").get_group()
    return module, Engine(module, world, mesh.get_group("local"))


def loss(model, batch):
    return F.huber_loss(model(batch[0]), batch[1])


generator = torch.Generator().manual_seed(4288)
truth = torch.randn(FEATURES, OUTPUTS, generator=generator, dtype=torch.float64)


def stations():
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x @ truth)


arguments = plain, parallel
options = dict(
    batches=[stations() for _ in range(4)],
    loss=loss,
    step=lambda built, batch: built[1].train_batch(batch),
    split={"node": 0, "local": 0},
    ranks={"node": 2, "local": 2},
    shard=lambda name: [(0, "node"), (0, "local")],
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
