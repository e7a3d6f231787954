"""Parallel code that is not titanlite's, as `titanlite.compare` gets it, with faults to find."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu

WIDTH, VOCABULARY = 8, 12


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model, batch):
    """The mean over all targets that are not masked."""
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_batches(*, is_masked: bool = False, num_steps: int = 2, length: int = 7):
    """Global batches of 4 sequences; with `is_masked` their numbers of targets differ."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num_steps):
        tokens = torch.randint(VOCABULARY, (4, length), generator=generator)
        targets = torch.randint(VOCABULARY, (4, length), generator=generator)
        if is_masked:
            targets[0, 1:] = -100
        batches.append({"tokens": tokens, "targets": targets})
    return batches


# PyTorch's own wrappers.


def with_ddp(mesh):
    return nn.parallel.DistributedDataParallel(Model())


def with_fsdp2(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def without_reduction(mesh):
    """Every rank trains on its own part, and nothing is reduced."""
    return Model()


def scaled_twice(mesh):
    """A hook divides what DDP has averaged already."""
    model = nn.parallel.DistributedDataParallel(Model())

    def average(state, bucket):
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / dist.get_world_size() ** 2)

    model.register_comm_hook(None, average)
    return model


def another_seed_on_each_rank(mesh):
    torch.manual_seed(dist.get_rank())
    return Model()


def with_plan(mesh, output=None):
    model = Model()
    plan = {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(output_layouts=output or Replicate()),
    }
    return parallelize_module(model, mesh["tp"], plan)


with_a_partial_output = functools.partial(with_plan, output=Partial())


def with_fsdp2_and_plan(mesh):
    model = with_plan(mesh)
    return fully_shard(model, mesh=mesh["dp"])


def with_a_pending_gradient(mesh):
    """The bias of `head` is a replicated DTensor, and its gradient claims to be a Partial."""
    model = with_plan(mesh)
    bias = nn.Parameter(distribute_tensor(model.head.bias.detach(), mesh, [Replicate()]))

    def claim(parameter):
        local = parameter.grad.to_local()
        parameter.grad = DTensor.from_local(local, mesh, [Partial()], run_check=False)

    bias.register_post_accumulate_grad_hook(claim)
    model.head.bias = bias
    model.head.forward = lambda x: nn.functional.linear(x, model.head.weight, bias.to_local())
    return model


def compiled(mesh):
    return torch.compile(with_ddp(mesh), backend="aot_eager")


# Megatron's pair of layers, made by hand.


class CopyToRanks(torch.autograd.Function):
    """The identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ParallelMlp(nn.Module):
    """The same as Mlp; `up` is cut by its outputs, `down` by its inputs."""

    def __init__(self, whole: Mlp, group, *, copies: bool = True, sums: bool = True, turn=0):
        super().__init__()
        self.group, self.copies, self.sums = group, copies, sums
        size = dist.get_world_size(group)
        index = (dist.get_rank(group) + turn) % size
        hidden = whole.up.out_features // size
        self.up = nn.Linear(whole.up.in_features, hidden)
        self.down = nn.Linear(hidden, whole.down.out_features, bias=False)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(size, 0)[index])
            self.up.bias.copy_(whole.up.bias.chunk(size, 0)[index])
            self.down.weight.copy_(whole.down.weight.chunk(size, 1)[index])

    def forward(self, x):
        if self.copies:
            x = CopyToRanks.apply(x, self.group)
        x = self.down(gelu(self.up(x)))
        if self.sums:
            x = SumOverRanks.apply(x, self.group)
        return x + self.bias


def by_hand(mesh, **faults):
    model = Model()
    group = mesh.get_group("tp")
    model.blocks = nn.ModuleList(ParallelMlp(block, group, **faults) for block in model.blocks)
    return model


def shard_by_hand(name):
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


def names_by_hand(name):
    is_bias = name.startswith("blocks") and name.count(".") == 2 and name.endswith(".bias")
    return name.replace(".bias", ".down.bias") if is_bias else name


without_copy = functools.partial(by_hand, copies=False)
without_sum = functools.partial(by_hand, sums=False)
with_turned_shards = functools.partial(by_hand, turn=1)


# Other ways to train.


def with_fsdp1(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    return FullyShardedDataParallel(
        Model(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )


class Stage(nn.Module):
    """The first or the last half of Model, under the names of Model."""

    def __init__(self, whole: Model, index: int) -> None:
        super().__init__()
        self.embed = whole.embed if index == 0 else None
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index]})
        self.head = whole.head if index == 1 else None

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = x + block(x)
        return x if self.head is None else self.head(x)


def with_pipeline(mesh, scales=True):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def mean(logits, targets):
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    index = dist.get_rank()
    module = Stage(Model(), index)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, Schedule1F1B(stage, 4, loss_fn=mean, scale_grads=scales)


def pipeline_step(built, batch):
    _, schedule = built
    losses = []
    inputs = (batch["tokens"],) if dist.get_rank() == 0 else ()
    schedule.step(*inputs, target=batch["targets"], losses=losses)
    return torch.stack(losses).mean() if losses else None


with_unscaled_pipeline = functools.partial(with_pipeline, scales=False)


# Mistakes.


def fails_on_one_rank(mesh):
    if dist.get_rank() == 1:
        raise RuntimeError("no such layer")
    return nn.parallel.DistributedDataParallel(Model())


def hangs(built, batch):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    value = loss(built, batch)
    value.backward()
    return value


def with_a_smaller_layer():
    model = Model()
    model.blocks[0] = Mlp(hidden=24)
    return model


def without_a_block():
    model = Model()
    del model.blocks[1]
    return model


def in_float32():
    return Model().float()


def with_another_name():
    model = Model()
    model.output = model.head
    del model.head
    return model


class RandomModel(Model):
    def forward(self, tokens):
        return nn.functional.dropout(10 * super().forward(tokens), 0.5)


def zigzag(batch, mesh):
    """The first and last quarter of each sequence on rank 0, the middle on rank 1."""
    index, length = mesh.get_local_rank("cp"), batch["tokens"].size(1)
    quarters = torch.arange(length).chunk(4)
    chosen = torch.cat([quarters[index], quarters[3 - index]])
    return {name: field[:, chosen] for name, field in batch.items()}


def with_a_larger_block(mesh):
    model = Model()
    model.blocks[1].register_forward_hook(lambda module, inputs, output: 1.5 * output)
    return nn.parallel.DistributedDataParallel(model)
