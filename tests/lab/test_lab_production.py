"""The parallelisms built by hand equal those that titanlite runs in production.

The same chain of layers as an nn.Module, through apply_ddp, apply_fsdp, apply_tp and a pipeline,
with titanlite's optimizer: losses, first gradients and weights after AdamW steps, in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from titanlite.modules.batch import make_batch
from titanlite.modules.shards import local_part, shard_of, whole_tensor
from titanlite.parallelize import (
    ParallelPlan,
    PipelineRunner,
    apply_ddp,
    apply_fsdp,
    apply_tp,
    split_model,
)
from titanlite.schedule import make_schedule
from titanlite.tools.lab import (
    Mesh,
    data_parallelism_main,
    get_init_params,
    pipeline_parallelism_main,
    single_process_main,
    spawn,
    tensor_parallelism_main,
    three_d_parallelism_main,
    zero_parallelism_main,
)
from titanlite.training.optimizer import build_optimizer

W, BATCH, DIM, LAYERS, STEPS, MICRO_BATCHES = 4, 16, 24, 8, 3, 8
WEIGHTS_BYTES = LAYERS * DIM * DIM * 8
PLAN = ParallelPlan(
    tensor_parallel={"layers.*.linear": ColwiseParallel(output_layouts=Replicate())}
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False, dtype=torch.float64)

    def forward(self, x):
        return F.gelu(self.linear(x))


class Rows(nn.Module):
    """The data; a token [B, 1] is the index of a row."""

    def __init__(self, data):
        super().__init__()
        self.register_buffer("data", data)

    def forward(self, tokens):
        return self.data[tokens.squeeze(1)]


class Chain(nn.Module):
    """The lecture's model as linear layers, which store the weight transposed."""

    def __init__(self, data=None):
        super().__init__()
        self.rows = None if data is None else Rows(data)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})

    def forward(self, x, positions=None):
        if self.rows is not None:
            x = self.rows(x)
        for block in self.layers.values():
            x = block(x)
        return x


@torch.no_grad()
def fill(model):
    for name, block in model.layers.items():
        weight = block.linear.weight
        full = get_init_params(DIM, DIM, 0, layer=int(name), dtype=torch.float64).T
        local_part(weight).copy_(shard_of(full.contiguous(), weight))


def optimizer_for(model):
    return build_optimizer(
        model.parameters(), lr=1e-3, beta2=0.999, weight_decay=0.01, implementation="for-loop"
    )


def collect(model, of):
    return {
        int(name): whole_tensor(of(block.linear.weight)).detach().T.clone()
        for name, block in model.layers.items()
    }


def train(model, data, num_global):
    optimizer = optimizer_for(model)
    losses, gradients = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(data).square().sum() / num_global
        loss.backward()
        gradients = gradients or collect(model, lambda weight: weight.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, collect(model, lambda weight: weight)


def by_ddp(device, data):
    model = Chain()
    fill(model)
    apply_ddp(model, init_device_mesh("cpu", (W,)))
    return train(model, data.chunk(W)[device.rank], data.numel())


def by_fsdp(device, data):
    model = Chain()
    apply_fsdp(model, init_device_mesh("cpu", (W,)), reshard_after_forward="always", plan=PLAN)
    fill(model)
    return train(model, data.chunk(W)[device.rank], data.numel())


def by_tp(device, data):
    model = Chain()
    apply_tp(model, init_device_mesh("cpu", (W,)), PLAN)
    fill(model)
    return train(model, data, data.numel())


def by_tp_and_fsdp(device, data):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Chain()
    apply_tp(model, mesh["tp"], PLAN)
    apply_fsdp(model, mesh["dp"], reshard_after_forward="always", plan=PLAN)
    fill(model)
    return train(model, data.chunk(2)[mesh.get_local_rank("dp")], data.numel())


def by_pipeline(device, data, schedule, num_microbatches, pp=W, dp=1, tp=1):
    """The stages of one rank of a pp x dp x tp mesh, sharded over tp and dp."""
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    stage, num_local = mesh.get_local_rank("pp"), LAYERS // pp
    names = [f"layers.{i}" for i in range(LAYERS)]
    stages = [names[i : i + num_local] for i in range(0, LAYERS, num_local)]
    stages[0].insert(0, "rows")
    part = split_model(Chain(data), stages)[stage]
    if tp > 1:
        apply_tp(part, mesh["tp"], PLAN)
    if dp > 1:
        apply_fsdp(part, mesh["dp"], pipelined=True, plan=PLAN)
    fill(part)
    tokens = torch.arange(BATCH).chunk(dp)[mesh.get_local_rank("dp")].unsqueeze(1)
    batch = make_batch(tokens)
    pipeline = PipelineRunner(
        make_schedule(schedule, pp, num_microbatches),
        {stage: part},
        split_model(Chain(data).to("meta"), stages),
        mesh["pp"],
        example=batch.rows(0, len(tokens) // num_microbatches),
        dtype=data.dtype,
    )
    optimizer = optimizer_for(part)
    losses, gradients = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_step = []

        def loss_function(y, _, of_step=of_step):
            loss = y.square().sum() / data.numel()
            of_step.append(loss.item())
            return loss

        pipeline.step(batch, loss_function)
        gradients = gradients or collect(part, lambda weight: weight.grad)
        optimizer.step()
        losses += [sum(of_step)] if pipeline.has_last else []
    return losses, gradients, collect(part, lambda weight: weight)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, DIM, dtype=torch.float64, generator=generator)


def assert_same(ours, theirs):
    """The largest difference of any layer, relative to the tensor's largest magnitude."""
    assert ours.keys() == theirs.keys()
    for layer, tensor in ours.items():
        assert theirs[layer].abs().max() > 0
        assert (tensor - theirs[layer]).abs().max() <= 1e-12 * theirs[layer].abs().max()


def merged(dicts):
    result = {}
    for each in dicts:
        for layer, part in each.items():
            result.setdefault(layer, []).append(part)
    return result


def columns(records, field):
    parts = merged(getattr(record, field) for record in records)
    return {layer: torch.cat(part, 1) for layer, part in parts.items()}


def flat(records, field):
    parts = merged(getattr(record, field) for record in records)
    return {layer: torch.cat(part).view(DIM, DIM) for layer, part in parts.items()}


def test_data_parallelism_is_apply_ddp(cluster_of_4, data):
    hand = spawn(data_parallelism_main, cluster_of_4, data, LAYERS, STEPS)
    ours = cluster_of_4.counts.torch_collective_bytes["all_reduce"]
    production = cluster_of_4.run(by_ddp, data)
    theirs = cluster_of_4.counts.torch_collective_bytes["all_reduce"]
    for record, (losses, gradients, params) in zip(hand, production, strict=True):
        # By hand, the loss is the local mean; in production, a part of the global mean.
        assert [loss / W for loss in record.losses] == pytest.approx(losses, rel=1e-12)
        assert_same(record.gradients, gradients)
        assert_same(record.params, params)
    assert ours == theirs == W * STEPS * WEIGHTS_BYTES


@pytest.fixture(scope="module")
def fsdp(cluster_of_4, data):
    """The results of the production code on every rank, and the counts."""
    return cluster_of_4.run(by_fsdp, data), cluster_of_4.counts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_apply_fsdp(cluster_of_4, data, fsdp, stage):
    hand = spawn(zero_parallelism_main, cluster_of_4, data, LAYERS, STEPS, stage=stage)
    ours = cluster_of_4.counts
    production, theirs = fsdp
    for record, (losses, gradients, params) in zip(hand, production, strict=True):
        assert record.losses == pytest.approx(losses, rel=1e-12)
        assert_same(flat(hand, "gradients"), gradients)
        assert_same(flat(hand, "params"), params)
    if stage == 3:
        # FSDP2 also all-gathers each layer in each pass, and reduces the gradients once.
        reduced = W * STEPS * WEIGHTS_BYTES
        assert ours.torch_collective_bytes["reduce_scatter"] == reduced
        assert theirs.torch_collective_bytes["reduce_scatter"] == reduced
        assert ours.torch_collective_bytes["all_gather"] == 2 * reduced
        # Plus the gathers of this test, to return the whole gradients and weights.
        assert theirs.torch_collective_bytes["all_gather"] == 2 * reduced + 2 * W * WEIGHTS_BYTES


def test_tensor_parallelism_is_apply_tp(cluster_of_4, data):
    hand = spawn(tensor_parallelism_main, cluster_of_4, data, LAYERS, num_steps=STEPS)
    ours = cluster_of_4.counts
    production = cluster_of_4.run(by_tp, data)
    theirs = cluster_of_4.counts
    for record, (losses, gradients, params) in zip(hand, production, strict=True):
        assert record.losses == pytest.approx(losses, rel=1e-12)
        assert_same(columns(hand, "gradients"), gradients)
        assert_same(columns(hand, "params"), params)
    # The same collectives, plus those of this test, which gather gradients and weights.
    assert theirs.torch_collectives["all_reduce"] == ours.torch_collectives["all_reduce"]
    assert theirs.torch_collectives["all_gather"] == (
        ours.torch_collectives["all_gather"] + 2 * W * LAYERS
    )
    for kind, of_test in (("all_reduce", 0), ("all_gather", 2 * W * WEIGHTS_BYTES)):
        assert theirs.torch_collective_bytes[kind] == ours.torch_collective_bytes[kind] + of_test


def test_tensor_and_data_parallelism_are_apply_tp_and_apply_fsdp(cluster_of_4, data):
    mesh = Mesh(pp=1, dp=2, tp=2)
    hand = spawn(
        three_d_parallelism_main, cluster_of_4, data, LAYERS, 1, mesh=mesh, num_steps=STEPS
    )
    production = cluster_of_4.run(by_tp_and_fsdp, data)
    for rank, (losses, gradients, params) in enumerate(production):
        replica = hand[rank - rank % 2 : rank - rank % 2 + 2]
        assert [loss / 2 for loss in hand[rank].losses] == pytest.approx(losses, rel=1e-12)
        assert_same(columns(replica, "gradients"), gradients)
        assert_same(columns(replica, "params"), params)


@pytest.mark.parametrize(("schedule", "name"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
def test_pipeline_parallelism_is_a_pipeline(cluster_of_4, data, schedule, name):
    hand = spawn(
        pipeline_parallelism_main,
        cluster_of_4,
        data,
        LAYERS,
        MICRO_BATCHES,
        num_steps=STEPS,
        schedule=schedule,
    )
    ours = cluster_of_4.counts
    production = cluster_of_4.run(by_pipeline, data, name, MICRO_BATCHES)
    for record, (losses, gradients, params) in zip(hand, production, strict=True):
        assert record.losses == pytest.approx(losses, rel=1e-12)
        assert_same(record.gradients, gradients)
        assert_same(record.params, params)
    # torch opens each of the 2 (W-1) links with a message of one float, with which stages agree on
    # a setting. In torch 2.11 the message has no content, and Pipeline omits it on CPU.
    num_opened = 2 * (W - 1) if hasattr(PipelineStage, "_warmup_forward_vote") else 0
    assert cluster_of_4.counts.d2d_messages == ours.d2d_messages + num_opened
    assert cluster_of_4.counts.d2d_bytes == ours.d2d_bytes + 4 * num_opened


def test_three_together_are_apply_tp_apply_fsdp_and_a_pipeline(cluster, data):
    mesh = cluster.mesh = Mesh(pp=2, dp=2, tp=2)
    hand = spawn(three_d_parallelism_main, cluster, data, LAYERS, 4, mesh=mesh, num_steps=STEPS)
    production = cluster.run(by_pipeline, data, "1F1B", 4, 2, 2, 2)
    for rank, (losses, gradients, params) in enumerate(production):
        replica = hand[rank - rank % 2 : rank - rank % 2 + 2]
        assert [loss / 2 for loss in hand[rank].losses] == pytest.approx(losses, rel=1e-12)
        assert_same(columns(replica, "gradients"), gradients)
        assert_same(columns(replica, "params"), params)


def test_all_of_them_are_one_process(data, fsdp):
    """Check the reference itself, which the comparisons above rely on."""
    alone = single_process_main(data, LAYERS, STEPS)
    for _, gradients, params in fsdp[0]:
        assert_same(alone.gradients, gradients)
        assert_same(alone.params, params)
