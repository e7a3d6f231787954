"""Ring attention by hand: against one process, against titanlite's own ring, messages and work."""

import pytest
import torch
import torch.nn.functional as F
from layouts import num_keys_sent
from torch.distributed.device_mesh import init_device_mesh

import titanlite.modules.attention
from titanlite.errors import RankError
from titanlite.tools.lab import Link, Mesh, ring_attention, shard_sequence, unshard_sequence
from titanlite.tools.lab.context_parallel import LAYOUTS

W, BATCH, HEADS, TOKENS, FEATURES = 4, 2, 3, 32, 5
# The bytes of one rank's keys and values.
K = 2 * BATCH * HEADS * TOKENS // W * FEATURES * 8


@pytest.fixture(scope="module")
def inputs():
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shape = 4, BATCH, HEADS, TOKENS, FEATURES
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def alone(inputs, causal):
    """The output and the gradients of q, k and v in one process."""
    q, k, v, dout = inputs
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_hand(device, shards, layout, causal, axes=None):
    rank = device.mesh.group(device.index, axes).index(device.rank)
    q, k, v, dout = (tensor.clone() for tensor in shards[rank])
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = ring_attention(device, *leaves, layout=layout, causal=causal, axes=axes)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def forward_only(device, shards, layout, causal):
    return ring_attention(device, *shards[device.rank][:3], layout=layout, causal=causal)


def production(device, inputs, layout, causal):
    mesh = init_device_mesh("cpu", (W,))
    layout = titanlite.modules.attention.make_layout(layout, W)
    q, k, v, dout = (layout.shard(tensor, 2, device.rank) for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = titanlite.parallelize.context_parallel.ring.ring_attention(
        *leaves, mesh, causal=causal, layout=layout
    )
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(ours, theirs, tolerance=1e-13):
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.shape == expected.shape
        assert expected.abs().max() > 0
        assert (mine - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_and_backward_are_those_of_one_process(cluster_of_4, inputs, layout, causal):
    shards = shard_sequence(inputs, W, layout)
    results = cluster_of_4.run(by_hand, shards, layout, causal)
    whole = [unshard_sequence(parts, layout) for parts in zip(*results, strict=True)]
    assert_same(whole, alone(inputs, causal))
    # Keys and values go W-1 hops forward; backward again, and their gradients as far.
    counts = cluster_of_4.counts
    assert counts.d2d_messages == W * 3 * (W - 1)
    assert counts.d2d_bytes == W * 3 * (W - 1) * K
    keys, gradients = "shift k, v over rank", "shift dk, dv over rank"
    forward, backward = [keys] * (W - 1), [keys, keys, gradients, keys, gradients, gradients]
    assert [str(each) for each in counts.collectives] == forward + backward


def test_overlap_on_a_slow_link_changes_nothing(cluster_of_4, inputs):
    shards = shard_sequence(inputs, W, "headtail")
    slow = Link(latency_seconds=1e-3)
    results = cluster_of_4.run(by_hand, shards, "headtail", True, link=slow)
    whole = [unshard_sequence(parts, "headtail") for parts in zip(*results, strict=True)]
    assert_same(whole, alone(inputs, True))


@pytest.mark.parametrize("layout", ["none", "headtail"])
def test_it_is_titanlites_ring_attention(cluster_of_4, inputs, layout):
    shards = shard_sequence(inputs, W, layout)
    n = TOKENS // W
    for causal in (True, False):
        ours = cluster_of_4.run(by_hand, shards, layout, causal)
        # A third is that of the forward pass; keys and values have K / n bytes a token.
        our_keys = cluster_of_4.counts.d2d_bytes / 3 / (K / n)
        theirs = cluster_of_4.run(production, inputs, layout, causal)
        for mine, expected in zip(ours, theirs, strict=True):
            assert_same(mine, expected)
        its = titanlite.modules.attention.make_layout(layout, W)
        their_keys = sum(num_keys_sent(its, rank, n, causal) for rank in range(W))
        # Under a mask, titanlite does not send keys that no later rank uses.
        share = {"none": 1 / 2, "headtail": 3 / 4}[layout] if causal else 1
        assert their_keys == share * our_keys


def test_sequences_on_an_axis_of_a_mesh(cluster, inputs):
    """Two replicas of two ranks each, and a ring of one, which sends nothing."""
    cluster.mesh = Mesh(replica=2, sequence=2)
    shards = shard_sequence(inputs, 2, "headtail")
    results = cluster.run(by_hand, shards, "headtail", True, ["sequence"])
    for replica in (results[:2], results[2:]):
        whole = [unshard_sequence(parts, "headtail") for parts in zip(*replica, strict=True)]
        assert_same(whole, alone(inputs, True))
    cluster.mesh = Mesh(sequence=1)
    (result,) = cluster.run(by_hand, [inputs], "headtail", True)
    assert_same(result, alone(inputs, True))
    assert cluster.counts.d2d_messages == 0


def test_large_scores_do_not_overflow(cluster_of_4, inputs):
    large = inputs.clone()
    large[0] *= 1e4
    results = cluster_of_4.run(by_hand, shard_sequence(large, W, "headtail"), "headtail", True)
    whole = [unshard_sequence(parts, "headtail") for parts in zip(*results, strict=True)]
    expected = alone(large, True)
    assert_same(whole[:1] + whole[3:], expected[:1] + expected[3:], 1e-11)


def test_what_cannot_be_split_is_said(cluster_of_4, inputs):
    message = "32 tokens cannot be split into the 12 equal chunks of the headtail layout on 6 ranks"
    with pytest.raises(ValueError, match=message):
        shard_sequence(inputs, 6, "headtail")
    with pytest.raises(ValueError, match="layout: 'spiral' is unknown; use one of none, headtail"):
        shard_sequence(inputs, 4, "spiral")
    with pytest.raises(RankError, match="layout: 'spiral' is unknown"):
        cluster_of_4.run(forward_only, [inputs[..., :8, :]] * 4, "spiral", True)
    unequal = [*shard_sequence(inputs, W, "headtail")[:3], inputs[..., :6, :]]
    with pytest.raises(RankError, match=r"rank 3: calls shift 0 .* the shape must be the same"):
        cluster_of_4.run(forward_only, unequal, "headtail", True)
