"""Sharded operations: costs equal the published ones; results and gradients equal one process."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlite.tools.lab import (
    DimSharding,
    FeedForward,
    FeedForwardBackward,
    FeedForwardSharding,
    FeedForwardShardingPolicy,
    MatMul,
    MatMulBackward,
    MatMulSharding,
    MatMulShardingPolicy,
    Mesh,
    ShardingError,
    TensorSharding,
    reshard,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sharded_operations.json").read_text())
INNER = {"(1,4)": "y", "(2,1)": "x", "(2,4)": ("x", "y")}


def golden_sharding(name):
    if name.startswith("MatchedInner"):
        inner = INNER[name.removeprefix("MatchedInner")]
        return MatMulSharding(TensorSharding(None, inner), TensorSharding(inner, None))
    dims = GOLDEN["shardings"][name]
    a, b = ([None if axis == "_" else axis for axis in dims[tensor]] for tensor in "AB")
    return MatMulSharding(TensorSharding(*a), TensorSharding(*b))


def assert_costs(counts, golden):
    for quantity in ("flops", "d2d_messages", "d2d_bytes", "h2d_bytes"):
        if quantity in golden:
            assert getattr(counts, quantity) == golden[quantity], quantity
    expected = golden.get("collectives", [])
    assert len(counts.collectives) == len(expected)
    for ours, theirs in zip(counts.collectives, expected, strict=True):
        # The published list omits the axes of an all-reduce.
        assert str(ours).startswith(theirs)


def rand(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()


POLICIES = {
    "Unsharded": "Unsharded",
    "MatchedInner(1,4)": "MatchedInnerSharding",
    "MatchedInner(2,1)": "MatchedInnerSharding",
    "MatchedInner(2,4)": "MatchedInnerSharding",
    "UnmatchedInner": "UnmatchedInnerSharding",
    "Outer": "OuterSharding",
    "Full": "FullSharding",
}


@pytest.mark.parametrize("name", GOLDEN["matmul"])
def test_matmul_costs_what_is_published(cluster, name):
    """The same program at full size on the meta device: messages are counted but not sent."""
    golden = GOLDEN["matmul"][name]
    sharding = golden_sharding(name)
    assert sharding.policy is MatMulShardingPolicy[POLICIES[name]]
    a, b = torch.empty(4096, 2048, device="meta"), torch.empty(2048, 4096, device="meta")
    cluster.run(MatMul(sharding), a, b)
    assert_costs(cluster.counts, golden)
    cluster.run(MatMul(sharding), a, b, algorithm="ring")
    ring = cluster.counts
    assert ring.d2d_bytes <= golden["d2d_bytes"]
    assert ring.d2d_bytes == golden.get("d2d_bytes_ring", ring.d2d_bytes)
    assert (ring.flops, ring.h2d_bytes) == (golden["flops"], golden["h2d_bytes"])


def feed_forward_inputs(batch, sequence, model, hidden, make=rand):
    shapes = [(batch, sequence, model), (model, hidden), (hidden,), (hidden, model), (model,)]
    return [make(*shape) for shape in shapes]


def golden_feed_forward():
    dims = GOLDEN["feed_forward"]["GSPMD"]["sharding"]
    return FeedForwardSharding(
        **{
            name.lower(): TensorSharding(*(None if axis == "_" else axis for axis in axes))
            for name, axes in dims.items()
        }
    )


def test_feed_forward_costs_what_is_published(cluster):
    inputs = feed_forward_inputs(
        8, 128, 1024, 4096, lambda *shape: torch.empty(shape, device="meta")
    )
    for name, sharding in [("Unsharded", FeedForwardSharding()), ("GSPMD", golden_feed_forward())]:
        assert sharding.policy is FeedForwardShardingPolicy[name]
        cluster.run(FeedForward(sharding), *inputs)
        assert_costs(cluster.counts, GOLDEN["feed_forward"][name])
        cluster.run(FeedForward(sharding), *inputs, algorithm="ring")
        # Gathers and scatters send as many bytes and messages on a ring.
        assert_costs(cluster.counts, GOLDEN["feed_forward"][name])


def feed_forward_reference(inputs, do):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    x, w1, b1, w2, b2 = leaves
    o = F.gelu(x @ w1 + b1) @ w2 + b2
    o.backward(do)
    return o.detach(), [leaf.grad for leaf in leaves]


def assert_feed_forward(cluster, sharding, inputs):
    do = rand(*inputs[0].shape).flip(0)
    o, gradients = feed_forward_reference(inputs, do)
    assert_same(FeedForward(sharding)(cluster, *inputs), o)
    ours = FeedForwardBackward(sharding)(cluster, *inputs, do)
    for mine, theirs in zip(ours, gradients, strict=True):
        assert_same(mine, theirs)


def test_backward_of_gspmd_gathers_what_forward_scattered(cluster):
    inputs = feed_forward_inputs(4, 3, 8, 16)
    cluster.run(FeedForwardBackward(golden_feed_forward()), *inputs, inputs[0])
    assert [str(each) for each in cluster.counts.collectives] == [
        "all_gather x1 over y",
        "all_gather w1 over x",
        "all_gather w2 over x",
        "all_reduce db2 over x",
        "all_gather dO over y",
        "reduce_scatter dX over y",
        "reduce_scatter dW1 over x",
        "all_reduce db1 over x",
        "reduce_scatter dW2 over x",
    ]
    # The recomputed hidden layer and the four products of the backward; the forward has two.
    cluster_flops = cluster.counts.flops
    cluster.run(FeedForward(golden_feed_forward()), *inputs)
    assert 2 * cluster_flops == 5 * cluster.counts.flops


MESHES = [Mesh(x=2, y=4), Mesh(x=4, y=2), Mesh(a=2, b=2, c=2), Mesh(x=6), Mesh(x=1, y=3)]


@st.composite
def shardings(draw, mesh, num_dims):
    """Each axis shards at most one dimension; axes within a dimension are in any order."""
    axes = draw(st.permutations(mesh.axes))
    dims = [[] for _ in range(num_dims)]
    for axis in axes:
        place = draw(st.integers(-1, num_dims - 1))
        if place >= 0:
            dims[place].append(axis)
    return TensorSharding(*dims)


def shape_for(mesh, draw, *tensors):
    """A size for each dimension name that divides evenly under the sharding of every tensor."""
    sizes = {}
    for names, sharding in tensors:
        for name, dim in zip(names, sharding.dims, strict=True):
            sizes.setdefault(name, set()).add(mesh.degree(dim.axes))
    result = {}
    for name, degrees in sizes.items():
        size = draw(st.integers(1, 2))
        for degree in degrees:
            size *= degree if size % degree else 1
        result[name] = size
    return result


any_case = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_case
@given(data=st.data())
def test_reshard_from_any_to_any(cluster, data):
    mesh = cluster.mesh = data.draw(st.sampled_from(MESHES))
    source, target = data.draw(shardings(mesh, 3)), data.draw(shardings(mesh, 3))
    sizes = shape_for(mesh, data.draw, ("abc", source), ("abc", target))
    tensor = torch.arange(sizes["a"] * sizes["b"] * sizes["c"]).view(*map(sizes.get, "abc"))
    shards = source.split(mesh, tensor)
    assert torch.equal(source.join(mesh, shards), tensor)

    def main(device, shards):
        return reshard(device, shards[device.rank], source, target)

    moved = cluster.run(main, shards)
    for ours, theirs in zip(moved, target.split(mesh, tensor), strict=True):
        assert torch.equal(ours, theirs)
    # No device receives more than its new shard.
    assert cluster.counts.d2d_bytes <= sum(shard.nbytes for shard in moved)


@any_case
@given(data=st.data())
def test_matmul_of_any_shardings(cluster, data):
    cluster.algorithm = data.draw(st.sampled_from(["naive", "ring"]))
    mesh = cluster.mesh = data.draw(st.sampled_from(MESHES))
    sharding = MatMulSharding(*(data.draw(shardings(mesh, 2)) for _ in range(3)))
    sizes = shape_for(mesh, data.draw, ("mk", sharding.a), ("kn", sharding.b), ("mn", sharding.c))
    m, k, n = map(sizes.get, "mkn")
    a, b, dc = rand(m, k), rand(k, n), rand(m, n)
    assert_same(MatMul(sharding)(cluster, a, b), a @ b)
    da, db = MatMulBackward(sharding)(cluster, a, b, dc)
    assert_same(da, dc @ b.T)
    assert_same(db, a.T @ dc)


@any_case
@given(data=st.data())
def test_feed_forward_of_any_shardings(cluster, data):
    cluster.algorithm = data.draw(st.sampled_from(["naive", "ring"]))
    mesh = cluster.mesh = data.draw(st.sampled_from(MESHES))
    names = {"x": "btm", "w1": "mh", "b1": "h", "w2": "hm", "b2": "m", "o": "btm"}
    drawn = {name: data.draw(shardings(mesh, len(dims))) for name, dims in names.items()}
    sizes = shape_for(mesh, data.draw, *((dims, drawn[name]) for name, dims in names.items()))
    assume(max(sizes.values()) <= 48)
    inputs = feed_forward_inputs(sizes["b"], sizes["t"], sizes["m"], sizes["h"])
    assert_feed_forward(cluster, FeedForwardSharding(**drawn), inputs)


def test_equals_dtensor(cluster):
    """The same placements under PyTorch's DTensor give the same product."""
    placements = {"x": 0, "y": 1}

    def by_dtensor(device, a, b, of_a, of_b):
        device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))

        def placed(tensor, sharding):
            where = [Replicate(), Replicate()]
            for dim in range(2):
                for axis in sharding[dim]:
                    where[placements[axis]] = Shard(dim)
            return distribute_tensor(tensor, device_mesh, where)

        product = placed(a, of_a) @ placed(b, of_b)
        assert isinstance(product, DTensor)
        return product.full_tensor()

    a, b = rand(16, 8), rand(8, 16)
    for name in ("MatchedInner(2,4)", "UnmatchedInner", "Outer", "Full"):
        sharding = golden_sharding(name)
        ours = MatMul(sharding)(cluster, a, b)
        for theirs in cluster.run(by_dtensor, a, b, sharding.a, sharding.b):
            assert_same(ours, theirs)


def test_a_dimension_names_its_axes():
    sharding = TensorSharding("x", None, ("y", "z"))
    assert str(sharding) == "[x, _, yz]"
    assert sharding.dims[2] == DimSharding(("y", "z"))
    assert sharding.local_shape(Mesh(x=2, y=3, z=2), (4, 5, 12)) == (2, 5, 2)


@pytest.mark.parametrize(
    ("a", "b", "shapes", "message"),
    [
        (("x", None), (None, None), [(5, 4), (4, 4)], "A: dimension 0 of size 5 does not divide"),
        ((None, None), (None, "y"), [(8, 4), (4, 6)], "B: dimension 1 of size 6 does not divide"),
        ((None, None), (None, None), [(8, 4), (6, 8)], "the inner dimensions 4 and 6 differ"),
        (("q", None), (None, None), [(8, 4), (4, 8)], "A: the sharding .* uses axis q"),
        (("x",), (None, None), [(8, 4), (4, 8)], "A of shape .* has 2 dimensions; its sharding"),
    ],
)
def test_what_cannot_work_is_refused_on_the_host(cluster, a, b, shapes, message):
    matmul = MatMul(MatMulSharding(TensorSharding(*a), TensorSharding(*b)))
    with pytest.raises(ShardingError, match=message):
        cluster.run(matmul, torch.ones(shapes[0]), torch.ones(shapes[1]))


def test_other_mistakes_are_refused_on_the_host(cluster):
    with pytest.raises(ShardingError, match="axis x is used more than once"):
        TensorSharding("x", "x")
    with pytest.raises(ShardingError, match="MatMul needs A, B, not 1 tensors"):
        cluster.run(MatMul(golden_sharding("Full")), torch.ones(8, 8))
    neither = TensorSharding(None, None)
    wanted = MatMulSharding(neither, neither, TensorSharding(None, "y"))
    with pytest.raises(ShardingError, match=r"C: dimension 1 of size 6 does not divide into 4"):
        cluster.run(MatMul(wanted), torch.ones(8, 8), torch.ones(8, 6))
    inputs = feed_forward_inputs(4, 3, 8, 16)
    with pytest.raises(ShardingError, match=r"b2 has shape \(9,\); W1 of \(8, 16\) needs \(8,\)"):
        cluster.run(FeedForward(FeedForwardSharding()), *inputs[:4], rand(9))
    with pytest.raises(ShardingError, match=r"dC has shape \(8, 9\); C has \(8, 8\)"):
        MatMulBackward(golden_sharding("Full"))(cluster, rand(8, 8), rand(8, 8), rand(8, 9))
    with pytest.raises(ShardingError, match="dO has shape"):
        FeedForwardBackward(FeedForwardSharding())(cluster, *inputs, rand(4, 3, 9))
