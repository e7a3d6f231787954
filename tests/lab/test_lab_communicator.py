"""Gradient buckets, and each parallelism by hand over the lab's own channels, also slow ones."""

import pytest
import torch
from test_lab_parallelism import assert_same

from titanlite.errors import RankError
from titanlite.tools.lab import (
    Link,
    data_parallelism_main,
    over_channels,
    pipeline_parallelism_main,
    single_process_main,
    spawn,
    tensor_parallelism_main,
    zero_parallelism_main,
)
from titanlite.tools.lab.data_parallel import GradientBuckets, pack

W, BATCH, DIM, LAYERS, STEPS = 4, 16, 24, 4, 2
LAYER_BYTES = DIM * DIM * 8
SLOW = Link(latency_seconds=1e-5, bytes_per_second=1e8)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(BATCH, DIM, dtype=torch.float64, generator=generator)


@pytest.fixture(scope="module")
def alone(data):
    """The run in one process."""
    return single_process_main(data, LAYERS, STEPS)


class Recorder:
    """A communicator of `size` equal ranks that records when each all-reduce starts."""

    def __init__(self, size, params):
        self.size, self.params, self.started = size, params, []

    def all_reduce(self, tensor):
        has_gradient = [param.grad is not None for param in self.params]
        self.started.append((tensor.numel(), has_gradient))
        tensor.mul_(self.size)
        return self

    def wait(self):
        pass


def weights(*sizes):
    return [torch.ones(size, requires_grad=True) for size in sizes]


def test_buckets_have_the_last_parameters_first_and_close_when_full():
    params = weights(1, 2, 3, 4, 5)

    def sizes(bucket_bytes):
        return [[param.numel() for param in bucket] for bucket in pack(params, bucket_bytes)]

    assert sizes(0) == [[5], [4], [3], [2], [1]]
    assert sizes(20) == [[5], [4, 3], [2, 1]]
    assert sizes(21) == [[5, 4], [3, 2, 1]]
    assert sizes(1 << 20) == [[5, 4, 3, 2, 1]]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_overlapped_bucket_starts_before_the_backward_pass_ends(overlap):
    params = weights(2, 2, 2, 2)
    recorder = Recorder(3, params)
    gradients = GradientBuckets(params, 16, recorder, overlap=overlap)
    for _ in range(2):
        recorder.started.clear()
        for param in params:
            param.grad = None
        x = torch.ones(2)
        for param in params:
            x = x * param
        x.sum().backward()
        gradients.wait()
        # The first bucket has the last two parameters; with overlap, the others come later.
        first = [not overlap, not overlap, True, True]
        assert recorder.started == [(4, first), (4, [True] * 4)]
        for param in params:
            torch.testing.assert_close(param.grad, torch.ones(2))


def test_a_bucket_that_fills_early_waits_for_those_before_it():
    first, last = weights(2, 3)
    recorder = Recorder(1, [first, last])
    gradients = GradientBuckets([first, last], 0, recorder, overlap=True)
    first.sum().backward()
    assert recorder.started == []
    last.sum().backward()
    assert [size for size, _ in recorder.started] == [3, 2]
    gradients.wait()


def test_a_parameter_without_a_gradient_is_said():
    params = weights(2, 2)
    gradients = GradientBuckets(params, 0, Recorder(1, params), overlap=True)
    params[0].sum().backward()
    with pytest.raises(RuntimeError, match="1 parameters have no gradient"):
        gradients.wait()


# (bytes of a bucket, number of buckets of four layers)
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(2 * LAYER_BYTES + 1, 2), (1 << 30, 1)])
@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_end_with_the_weights_of_one_process(
    cluster_of_4, data, alone, overlap, bucket_bytes, num_buckets
):
    options = {"overlap": overlap, "bucket_bytes": bucket_bytes}
    records = spawn(data_parallelism_main, cluster_of_4, data, LAYERS, STEPS, **options)
    counts = cluster_of_4.counts
    assert counts.torch_collectives["all_reduce"] == W * STEPS * num_buckets
    assert counts.torch_collective_bytes["all_reduce"] == W * STEPS * LAYERS * LAYER_BYTES
    job = over_channels(data_parallelism_main, **options)
    records += cluster_of_4.run(job, data, LAYERS, STEPS, algorithm="ring", link=SLOW)
    counts = cluster_of_4.counts
    # Each rank sends 2 (W-1) messages per bucket, of a W-th of the bucket.
    assert counts.d2d_messages == W * STEPS * num_buckets * 2 * (W - 1)
    assert counts.d2d_bytes == STEPS * LAYERS * LAYER_BYTES * 2 * (W - 1)
    for record in records:
        for layer in range(LAYERS):
            assert_same(record.gradients[layer], alone.gradients[layer])
            assert_same(record.params[layer], alone.params[layer])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("main", "args", "options"),
    [
        (tensor_parallelism_main, (), {"num_steps": STEPS}),
        (pipeline_parallelism_main, (8,), {"num_steps": STEPS}),
        (zero_parallelism_main, (STEPS,), {"stage": 2}),
        (zero_parallelism_main, (STEPS,), {"stage": 3}),
    ],
    ids=["tensor", "pipeline", "zero-2", "zero-3"],
)
def test_each_parallelism_over_slow_channels_is_that_over_torch(
    cluster_of_4, data, main, args, options, overlap
):
    theirs = spawn(main, cluster_of_4, data, LAYERS, *args, **options)
    job = over_channels(main, overlap=overlap, **options)
    ours = cluster_of_4.run(job, data, LAYERS, *args, algorithm="ring", link=SLOW)
    counts = cluster_of_4.counts
    # Only the barrier at the end is torch's.
    assert counts.torch_collectives == {"barrier": W}
    assert counts.d2d_messages > 0
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.losses == pytest.approx(reference.losses, rel=1e-12)
        assert mine.params.keys() == reference.params.keys()
        for layer in mine.params:
            assert_same(mine.gradients[layer], reference.gradients[layer])
            assert_same(mine.params[layer], reference.params[layer])


def test_an_error_in_the_communication_thread_reaches_the_caller(cluster_of_4):
    def main(rank, world_size, *, communicator):
        communicator.reduce_scatter(torch.empty(3), list(torch.ones(W, 2))).wait()

    with pytest.raises(RankError, match="RuntimeError: The size of tensor a"):
        cluster_of_4.run(over_channels(main))
