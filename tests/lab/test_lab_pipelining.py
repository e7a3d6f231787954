"""The clocked pipeline for any runs and stages, and the pipelined MLP against autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanlite.tools.lab import MLP, Mesh, Pipeline, PipelineError

SIZES = (6, 10, 12, 9, 4)
BATCH, STEPS, LR = 3, 4, 1e-2


def test_the_clock_of_a_small_pipeline():
    pipeline = Pipeline(Mesh(stage=3), num_runs=2, num_stages=3)
    assert str(pipeline).splitlines() == [
        "stage 0  F0 F1 .  .  .  .  B0 B1",
        "stage 1  .  F0 F1 .  .  B0 B1 .",
        "stage 2  .  .  F0 F1 B0 B1 .  .",
    ]
    serving = Pipeline(Mesh(stage=3), num_runs=2, num_stages=3, is_training=False)
    assert str(serving).splitlines() == [
        "stage 0  F0 F1 .  .",
        "stage 1  .  F0 F1 .",
        "stage 2  .  .  F0 F1",
    ]


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_clock_is_right_for_any_runs_and_stages(num_runs, num_stages):
    pipeline = Pipeline(Mesh(stage=num_stages), num_runs, num_stages)
    when = {}
    for index in range(num_stages):
        stages = [pipeline.stage(index, cycle) for cycle in range(pipeline.num_cycles)]
        for stage in stages:
            assert stage.is_forward + stage.is_backward + stage.is_idle == 1
            assert (stage.run is None) == stage.is_idle
            assert stage.is_first == (index == 0)
            assert stage.is_last == (index == num_stages - 1)
            if not stage.is_idle:
                when[index, stage.run, stage.is_forward] = stage.cycle
        assert sum(stage.is_idle for stage in stages) == round(
            pipeline.bubble * pipeline.num_cycles
        )
    # Every run passes every stage once in each direction, in consecutive cycles.
    assert len(when) == 2 * num_runs * num_stages
    for run in range(num_runs):
        path = [when[index, run, True] for index in range(num_stages)]
        back = [when[index, run, False] for index in reversed(range(num_stages))]
        assert path == list(range(run, run + num_stages))
        assert back == list(range(back[0], back[0] + num_stages))
        assert back[0] >= path[-1] + 1
    assert max(when.values()) == pipeline.num_cycles - 1
    # The first backward pass comes directly after the last forward pass.
    assert when[num_stages - 1, 0, False] == when[num_stages - 1, num_runs - 1, True] + 1


def unsplit_forward(tensors, x):
    num_layers = len(tensors) // 2
    for layer in range(num_layers):
        x = x @ tensors[2 * layer] + tensors[2 * layer + 1]
        x = x if layer == num_layers - 1 else F.gelu(x)
    return x


def unsplit(parameters, inputs, targets):
    """The same training of the whole model with autograd: losses, first gradients, weights."""
    leaves = [tensor.clone().requires_grad_() for stage in parameters for tensor in stage]
    optimizer = torch.optim.AdamW(leaves, lr=LR)
    losses, gradients = [], []
    for x, target in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss = (unsplit_forward(leaves, x) - target).square().mean()
        loss.backward()
        gradients = gradients or [leaf.grad.clone() for leaf in leaves]
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, leaves, optimizer


def flat(by_stage):
    return [tensor for stage in sorted(by_stage) for tensor in by_stage[stage]]


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-12 * other.abs().max()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_equals_the_unsplit_model(cluster, data):
    """Any runs and stages (including one), also with more devices than stages."""
    num_runs, num_stages = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    cluster.mesh = Mesh(stage=data.draw(st.sampled_from([num_stages, 8])))
    pipeline = Pipeline(cluster.mesh, num_runs, num_stages)
    mlp = MLP(pipeline, SIZES, lr=LR)
    parameters = mlp.build_parameters(dtype=torch.float64)
    generator = torch.Generator().manual_seed(num_runs)
    shape = (STEPS, num_runs, BATCH)
    inputs = torch.randn(*shape, SIZES[0], generator=generator, dtype=torch.float64)
    targets = torch.randn(*shape, SIZES[-1], generator=generator, dtype=torch.float64)

    result = mlp(cluster, parameters, inputs, targets)
    losses, gradients, weights, optimizer = unsplit(parameters, inputs, targets)
    assert result.losses == pytest.approx(losses, rel=1e-12)
    assert_same(flat(result.gradients), gradients)
    assert_same(flat(result.parameters), [weight.detach() for weight in weights])
    states = [
        state["exp_avg_sq"]
        for stage in sorted(result.optimizer_states)
        for _, state in sorted(result.optimizer_states[stage]["state"].items())
    ]
    assert_same(states, [optimizer.state[weight]["exp_avg_sq"] for weight in weights])
    # Each run crosses each link between stages once forward and once backward per step.
    num_links = num_stages - 1
    assert cluster.counts.d2d_messages == STEPS * 2 * num_runs * num_links

    serving = MLP(Pipeline(cluster.mesh, num_runs, num_stages, is_training=False), SIZES)
    outputs = serving(cluster, parameters, inputs[:1]).outputs
    expected = unsplit_forward([tensor for stage in parameters for tensor in stage], inputs[0])
    assert_same([outputs], [expected])
    assert cluster.counts.d2d_messages == num_runs * num_links


def test_four_stages_hold_their_own_layers_and_only_the_ends_get_data(cluster):
    cluster.mesh = Mesh(stage=4)
    pipeline = Pipeline(cluster.mesh, num_runs=8, num_stages=4)
    mlp = MLP(pipeline, SIZES)
    parameters = mlp.build_parameters()
    assert [tuple(stage[0].shape) for stage in parameters] == [(6, 10), (10, 12), (12, 9), (9, 4)]
    assert parameters[0][0][0, 0] != parameters[1][0][0, 0]
    inputs, targets = torch.ones(1, 8, BATCH, 6), torch.zeros(1, 8, BATCH, 4)
    result = mlp(cluster, parameters, inputs, targets)
    weights = [sum(tensor.nbytes for tensor in stage) for stage in parameters]
    assert [counts.h2d_bytes for counts in cluster.device_counts] == [
        weights[0] + inputs.nbytes,
        weights[1],
        weights[2],
        weights[3] + targets.nbytes,
    ]
    # Returned per tensor: weight, gradient, and AdamW's two moments and step count.
    num_tensors = len(flat(result.parameters))
    assert cluster.counts.d2h_bytes == 4 * sum(weights) + 4 * num_tensors


def test_what_cannot_work_is_refused(cluster):
    mesh = cluster.mesh
    with pytest.raises(PipelineError, match="0 runs and 4 stages; there must be at least one"):
        Pipeline(mesh, 0, 4)
    with pytest.raises(PipelineError, match="9 stages need as many devices, of Mesh"):
        Pipeline(mesh, 2, 9)
    with pytest.raises(PipelineError, match="4 layers are too few for 5 stages"):
        MLP(Pipeline(mesh, 2, 5), SIZES)
    mlp = MLP(Pipeline(mesh, 2, 4), SIZES)
    parameters = mlp.build_parameters()
    inputs, targets = torch.ones(1, 2, 3, 6), torch.ones(1, 2, 3, 4)
    with pytest.raises(PipelineError, match=r"inputs: the shape is .*; it must be \(steps, 2 runs"):
        mlp(cluster, parameters, inputs[:, :1], targets)
    with pytest.raises(PipelineError, match="training needs a target for every row"):
        mlp(cluster, parameters, inputs)
    with pytest.raises(PipelineError, match="parameters: there are 3 lists for 4 stages"):
        mlp(cluster, parameters[:3], inputs, targets)
