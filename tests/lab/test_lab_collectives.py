"""Every collective, naive and ring, against torch.distributed and against its definition."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanlite.tools.lab import Mesh

KINDS = [
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
]


def of_torch(kind, tensor, root):
    """The same collective of torch.distributed over all ranks; None if this rank gets no result."""
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [part.contiguous() for part in tensor.chunk(size)]
    like, many = torch.empty_like(parts[0]), [torch.empty_like(tensor) for _ in range(size)]
    at_root = rank == root
    if kind == "broadcast":
        dist.broadcast(tensor, root)
        return tensor
    if kind == "scatter":
        dist.scatter(like, parts if at_root else None, root)
        return like
    if kind == "gather":
        dist.gather(tensor, many if at_root else None, root)
        return torch.cat(many) if at_root else None
    if kind == "reduce":
        dist.reduce(tensor, root)
        return tensor if at_root else None
    if kind == "all_gather":
        dist.all_gather(many, tensor)
        return torch.cat(many)
    if kind == "all_reduce":
        dist.all_reduce(tensor)
        return tensor
    if kind == "reduce_scatter":
        dist.reduce_scatter(like, parts)
        return like
    received = torch.empty_like(tensor)
    # Use the tensor form: gloo does not support the list form in torch 2.11.
    dist.all_to_all_single(received, tensor)
    return received


@pytest.mark.parametrize("algorithm", ["naive", "ring"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_equals_torch_distributed(cluster_of_4, kind, algorithm, dtype):
    def both(device):
        generator = torch.Generator().manual_seed(device.rank)
        tensor = torch.randint(-(2**40), 2**40, (8, 3), generator=generator).to(dtype)
        tensor = tensor / 7 if dtype.is_floating_point else tensor
        rooted = kind in ("broadcast", "scatter", "gather", "reduce")
        options = {"root": 2} if rooted else {}
        before = tensor.clone()
        ours = getattr(device, kind)(tensor, **options)
        assert torch.equal(tensor, before)
        return ours, of_torch(kind, tensor, 2)

    for ours, theirs in cluster_of_4.run(both, algorithm=algorithm):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Floats may be summed in a different order: allow rounding error of the largest addend.
            rounding = 2**40 * 1e-16 if dtype.is_floating_point else 0
            torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding)


@pytest.mark.parametrize("algorithm", ["naive", "ring"])
def test_a_sum_of_floats_has_the_same_bits_on_every_device(cluster, algorithm):
    def main(device):
        return device.all_reduce(
            torch.randn(37, generator=torch.Generator().manual_seed(device.rank))
        )

    sums = cluster.run(main, algorithm=algorithm)
    assert all(torch.equal(each, sums[0]) for each in sums)


# Messages and bytes over all W devices, for a tensor of n bytes on each.
W, N = 8, 8 * 16
COSTS = {
    "naive": {
        "broadcast": (W - 1, (W - 1) * N),
        "scatter": (W - 1, (W - 1) * N // W),
        "gather": (W - 1, (W - 1) * N),
        "reduce": (W - 1, (W - 1) * N),
        "all_gather": (W * (W - 1), W * (W - 1) * N),
        "all_reduce": (W * (W - 1), W * (W - 1) * N),
        "reduce_scatter": (W * (W - 1), (W - 1) * N),
        "all_to_all": (W * (W - 1), (W - 1) * N),
        "barrier": (2 * (W - 1), 2 * (W - 1)),
    },
    "ring": {
        # A chain of W-1 links carries all W chunks.
        "broadcast": (W * (W - 1), (W - 1) * N),
        # The part of the device d hops away crosses d links.
        "scatter": (W * (W - 1) // 2, (W - 1) * N // 2),
        "gather": (W * (W - 1) // 2, W * (W - 1) // 2 * N),
        "reduce": (W * (W - 1), (W - 1) * N),
        "all_gather": (W * (W - 1), W * (W - 1) * N),
        "all_reduce": (2 * W * (W - 1), 2 * (W - 1) * N),
        "reduce_scatter": (W * (W - 1), (W - 1) * N),
        # Bundles of W-1, W-2, ... 1 parts.
        "all_to_all": (W * (W - 1), W * (W - 1) // 2 * N),
        "barrier": (2 * W, 2 * W),
    },
}


@pytest.mark.parametrize("algorithm", ["naive", "ring"])
@pytest.mark.parametrize("kind", [*KINDS, "barrier"])
def test_messages_and_bytes(cluster, kind, algorithm):
    def main(device):
        tensors = [] if kind == "barrier" else [torch.ones(16, dtype=torch.float64)]
        getattr(device, kind)(*tensors)

    cluster.run(main, algorithm=algorithm)
    counts = cluster.counts
    assert (counts.d2d_messages, counts.d2d_bytes) == COSTS[algorithm][kind]
    assert [str(each) for each in counts.collectives] == [f"{kind} over x and y"]


def test_all_scatter_is_the_sending_half_of_an_all_gather(cluster):
    def main(device):
        mine = torch.full((3,), device.rank)
        transfers = device.all_scatter(mine, ["y"])
        group = device.group(["y"])
        received = [mine if r == group.rank else group.recv(mine, r) for r in range(group.size)]
        for transfer in transfers:
            transfer.wait()
        return torch.cat(received), device.all_gather(mine, ["y"])

    for ours, gathered in cluster.run(main):
        assert torch.equal(ours, gathered)
    assert cluster.counts.d2d_messages == 2 * 24


@pytest.mark.parametrize("algorithm", ["naive", "ring"])
def test_large_messages_do_not_wait_for_each_other(cluster_of_4, algorithm):
    def main(device):
        tensor = torch.ones(1 << 20, dtype=torch.float64)
        device.all_gather(tensor)
        device.all_to_all(tensor)
        return device.all_reduce(tensor).sum().item()

    assert cluster_of_4.run(main, algorithm=algorithm) == [4 * (1 << 20)] * 4


def test_a_barrier_holds_every_device_until_all_are_there(cluster):
    def main(device, folder):
        (folder / f"before-{device.rank}").touch()
        device.barrier()
        return len(list(folder.glob("before-*")))

    import pathlib
    import tempfile

    for algorithm in ("naive", "ring"):
        with tempfile.TemporaryDirectory() as folder:
            assert cluster.run(main, pathlib.Path(folder), algorithm=algorithm) == [8] * 8


def test_a_dimension_that_cannot_be_cut_is_refused(cluster_of_4):
    with pytest.raises(Exception, match="dimension 0 of size 6 cannot be split into 4 equal"):
        cluster_of_4.run(lambda device: device.reduce_scatter(torch.ones(6)))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_mesh_any_axes_any_shape(cluster, data):
    """Each collective equals its definition, computed on the host from the inputs of all ranks."""
    sizes = data.draw(st.sampled_from([(1,), (5,), (2, 2), (3, 2), (2, 4), (1, 7), (2, 2, 2)]))
    mesh = cluster.mesh = Mesh(**dict(zip("abc", sizes, strict=False)))
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    size = mesh.degree(axes)
    dim = data.draw(st.integers(0, 1))
    shape = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))]
    shape[dim] *= size
    root = data.draw(st.integers(0, size - 1))
    kind = data.draw(st.sampled_from(KINDS))
    algorithm = data.draw(st.sampled_from(["naive", "ring"]))
    inputs = torch.randint(-1000, 1000, (mesh.size, *shape))
    options = {
        name: value
        for name, value, kinds in [
            ("root", root, ("broadcast", "scatter", "gather", "reduce")),
            ("dim", dim, ("scatter", "gather", "all_gather", "reduce_scatter")),
            ("cut_dim", dim, ("all_to_all",)),
        ]
        if kind in kinds
    }

    def main(device, inputs):
        return getattr(device, kind)(inputs[device.rank], axes, **options)

    results = cluster.run(main, inputs, algorithm=algorithm)
    for rank, result in enumerate(results):
        group = mesh.group(mesh.index(rank), axes)
        place = group.index(rank)
        tensors = [inputs[peer] for peer in group]
        total = functools.reduce(torch.add, tensors)
        expected = {
            "broadcast": tensors[root],
            "scatter": tensors[root].chunk(size, dim)[place],
            "gather": torch.cat(tensors, dim) if place == root else None,
            "reduce": total if place == root else None,
            "all_gather": torch.cat(tensors, dim),
            "all_reduce": total,
            "reduce_scatter": total.chunk(size, dim)[place],
            "all_to_all": torch.cat([tensor.chunk(size, dim)[place] for tensor in tensors]),
        }[kind]
        assert (result is None) == (expected is None)
        assert result is None or torch.equal(result, expected)
