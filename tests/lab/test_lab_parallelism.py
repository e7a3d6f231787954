"""Parallelisms by hand against one process: losses, first gradients, weights after AdamW steps.

The notes, test_lab_communicator.py and test_lab_production.py have the usual cases.
Differences are in float64, relative to the largest magnitude of a tensor: an error relative to an
element near zero would be meaningless.
"""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from titanlite.errors import RankError
from titanlite.ranks.launch import spawn as spawn_ranks
from titanlite.tools.lab import (
    Mesh,
    data_parallelism_main,
    get_init_params,
    gpipe,
    int_divide,
    one_forward_one_backward,
    pipeline_parallelism_main,
    single_process_main,
    spawn,
    three_d_parallelism_main,
    zero_parallelism_main,
)

W, BATCH, DIM, LAYERS, STEPS, MICRO_BATCHES = 4, 16, 24, 8, 3, 8
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, DIM, dtype=torch.float64, generator=generator)


@pytest.fixture(scope="module")
def alone(data):
    """The run in one process."""
    return single_process_main(data, LAYERS, STEPS)


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def assert_same_run(alone, losses, gradients, params):
    assert losses == pytest.approx(alone.losses, rel=TOLERANCE)
    for layer in range(LAYERS):
        assert_same(gradients[layer], alone.gradients[layer])
        assert_same(params[layer], alone.params[layer])


def side_by_side(records, field):
    """The whole of each layer, from the columns of all ranks that hold a part of it."""
    held = [getattr(record, field) for record in records]
    return {i: torch.cat([part[i] for part in held if i in part], 1) for i in range(LAYERS)}


def test_the_reference_learns_and_no_two_layers_start_alike(alone):
    assert alone.losses[-1] < alone.losses[0]
    weights = [get_init_params(DIM, DIM, 0, layer=i).detach() for i in range(LAYERS)]
    assert len({weight[0, 0].item() for weight in weights}) == LAYERS
    assert weights[0].std().item() * DIM**0.5 == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
def test_a_schedule_does_everything_once_and_forward_first(make, num_micro_batches):
    for stage in range(4):
        actions = make(stage, 4, num_micro_batches)
        assert len(actions) == len(set(actions)) == 2 * num_micro_batches
        for m in range(num_micro_batches):
            assert actions.index(("forward", m)) < actions.index(("backward", m))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_fewer_microbatches_than_stages(cluster_of_4, data, alone, num_micro_batches):
    records = spawn(
        pipeline_parallelism_main, cluster_of_4, data, LAYERS, num_micro_batches, num_steps=STEPS
    )
    gradients, params = side_by_side(records, "gradients"), side_by_side(records, "params")
    assert_same_run(alone, records[-1].losses, gradients, params)


def test_zero_pads_a_layer_that_does_not_divide(cluster_of_4):
    data = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = single_process_main(data, 2, STEPS)
    for stage in (1, 2, 3):
        records = spawn(zero_parallelism_main, cluster_of_4, data, 2, STEPS, stage=stage)
        for i in range(2):
            flat = torch.cat([record.params[i] for record in records])
            assert flat.numel() == 28
            assert_same(flat[:25].view(5, 5), alone.params[i])


def test_other_shapes_of_the_three(cluster, data, alone):
    for mesh in (Mesh(pp=4, dp=1, tp=2), Mesh(tp=4, pp=2, dp=1)):
        cluster.mesh = mesh
        records = spawn(
            three_d_parallelism_main, cluster, data, LAYERS, 4, mesh=mesh, num_steps=STEPS
        )
        losses = max((record.losses for record in records), key=len)
        assert_same_run(
            alone, losses, side_by_side(records, "gradients"), side_by_side(records, "params")
        )


def test_what_does_not_divide_is_said(cluster_of_4, data):
    with pytest.raises(RankError, match="ValueError: 15 does not divide into 4 equal parts"):
        spawn(data_parallelism_main, cluster_of_4, data[:15], LAYERS, 1)
    with pytest.raises(RankError, match="ValueError: stage: 4 is not a ZeRO stage; use 1, 2"):
        spawn(zero_parallelism_main, cluster_of_4, data, LAYERS, 1, stage=4)
    with pytest.raises(RankError, match="8 devices, but there are 4 ranks"):
        spawn(three_d_parallelism_main, cluster_of_4, data, LAYERS, 1)
    with pytest.raises(ValueError, match="7 does not divide into 2 equal parts"):
        int_divide(7, 2)


def test_a_main_function_opens_its_own_world_where_there_is_none(data):
    """As in the lecture's code, under torchrun: setup opens a process group, cleanup closes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def main(place, data):
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"LOCAL_RANK": str(place.rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
        record = data_parallelism_main(place.rank, 2, data, 2, 2)
        return record.params, dist.is_initialized()

    expected = single_process_main(data, 2, 2).params
    for params, is_open in spawn_ranks(main, 2, data, timeout_seconds=60):
        assert not is_open
        assert_same(params[1], expected[1])
