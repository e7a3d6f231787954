"""Experts by hand: against one process, against titanlite's experts, messages, bytes, capacity."""

import pytest
import torch
import torch.distributed as dist
from test_lab_context_parallel import assert_same

from titanlite.errors import RankError
from titanlite.modules.experts import ExpertLayer
from titanlite.modules.experts.dispatch import Exchange
from titanlite.tools.lab import Experts, Link, Mesh, expert_parallel_layer, single_process_layer
from titanlite.tools.lab.expert_parallel import capacity_of, has_place

W, TOKENS, FEATURES, HIDDEN, EXPERTS, TOP_K = 4, 24, 6, 10, 8, 3


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def make(skew=0.0):
    """Tokens, gate, experts and the gradient of the output. With `skew`, expert 5 is popular."""
    x, gate = draw(W * TOKENS, FEATURES, seed=1), draw(FEATURES, EXPERTS, seed=2)
    x[:, 0] = 1
    gate[0, 5] += skew
    sizes = (EXPERTS, FEATURES, HIDDEN), (EXPERTS, HIDDEN, FEATURES), (EXPERTS, FEATURES, HIDDEN)
    weights = [draw(*size, seed=3 + i) for i, size in enumerate(sizes)]
    return x, gate, weights, draw(W * TOKENS, FEATURES, seed=9)


def alone(skew=0.0, capacity_factor=None):
    """Output, and the gradients of tokens, gate and experts, in one process."""
    x, gate, weights, dout = make(skew)
    leaves = [tensor.requires_grad_() for tensor in (x, gate, *weights)]
    experts = Experts(*leaves[2:])
    out = single_process_layer(
        x, gate, experts, top_k=TOP_K, capacity_factor=capacity_factor, num_groups=W
    )
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_hand(device, skew=0.0, capacity_factor=None, axes=None):
    ranks = device.mesh.group(device.index, axes)
    rank, size = ranks.index(device.rank), len(ranks)
    x, gate, weights, dout = make(skew)
    own = Experts(*weights).shard(rank, size)
    leaves = [
        tensor.clone().requires_grad_()
        for tensor in (x.chunk(size)[rank], gate, own.w1, own.w2, own.w3)
    ]
    out, load = expert_parallel_layer(
        device,
        leaves[0],
        leaves[1],
        Experts(*leaves[2:]),
        top_k=TOP_K,
        capacity_factor=capacity_factor,
        axes=axes,
    )
    out.backward(dout.chunk(size)[rank])
    return [out.detach(), *(leaf.grad for leaf in leaves)], load


def joined(results):
    """Tokens and experts side by side; the gate's gradient is a sum."""
    out, dx, dgate, *dweights = zip(*results, strict=True)
    return [torch.cat(out), torch.cat(dx), sum(dgate), *map(torch.cat, dweights)]


def test_slots_get_places_in_the_order_of_the_tokens():
    chosen = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
    assert has_place(chosen, 3, 2).tolist() == [
        [True, True],
        [True, True],
        [True, False],
        [False, False],
    ]
    assert has_place(chosen, 3, None).all()
    assert capacity_of(num_tokens=10, top_k=2, num_experts=8, factor=1.0) == 3


def test_which_slots_are_dropped_depends_on_the_number_of_groups():
    x, gate, weights, _ = make(4.0)

    def outputs(num_groups, capacity_factor=1.0):
        return single_process_layer(
            x,
            gate,
            Experts(*weights),
            top_k=TOP_K,
            capacity_factor=capacity_factor,
            num_groups=num_groups,
        )

    assert not torch.allclose(outputs(2), outputs(4))
    # An expert gets at most one slot of each token.
    assert torch.equal(outputs(2, EXPERTS / TOP_K), outputs(4, None))


@pytest.mark.parametrize("skew", [0.0, 4.0, 100.0])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_forward_and_backward_are_those_of_one_process(cluster_of_4, skew, capacity_factor):
    answers = cluster_of_4.run(by_hand, skew, capacity_factor)
    results, loads = zip(*answers, strict=True)
    assert_same(joined(results), alone(skew, capacity_factor))
    num_slots = W * TOKENS * TOP_K
    computed = sum(sum(load.received) for load in loads)
    assert computed + sum(load.num_dropped for load in loads) == num_slots
    if capacity_factor is None:
        assert computed == num_slots
    else:
        # Nine slots of each rank, from four ranks.
        assert max(max(load.received) for load in loads) <= 4 * 9
        assert computed < num_slots
    if skew == 100.0 and capacity_factor is None:
        # Every token has chosen expert 5, the second of rank 2.
        assert loads[2].received[1] == W * TOKENS


def production(device):
    x, gate, weights, dout = make()
    layer = ExpertLayer(
        FEATURES, HIDDEN, EXPERTS, TOP_K, score_func="softmax", normalize=True
    ).double()
    own = Experts(*weights).shard(device.rank, W)
    layer.router.gate.weight.data = gate.T.contiguous()
    for name in ("w1", "w2", "w3"):
        weight = getattr(own, name).mT.contiguous()
        setattr(layer.experts, name, torch.nn.Parameter(weight))
    layer.experts.exchange = Exchange(dist.group.WORLD)
    x = x.chunk(W)[device.rank].clone().unsqueeze(1).requires_grad_()
    out = layer(x, torch.arange(TOKENS))
    out.backward(dout.chunk(W)[device.rank].unsqueeze(1))
    of_experts = [getattr(layer.experts, name).grad.mT for name in ("w1", "w2", "w3")]
    gradients = [x.grad.squeeze(1), layer.router.gate.weight.grad.T, *of_experts]
    return [out.detach().squeeze(1), *gradients]


def test_it_is_titanlites_expert_layer(cluster_of_4):
    ours = [result for result, _ in cluster_of_4.run(by_hand)]
    theirs = cluster_of_4.run(production)
    # Three all-to-alls forward, two backward.
    assert cluster_of_4.counts.torch_collectives == {"all_to_all": 5 * W}
    for mine, expected in zip(ours, theirs, strict=True):
        assert_same(mine, expected)


def test_the_ring_algorithm_a_slow_link_and_other_meshes(cluster_of_4, cluster):
    link = Link(latency_seconds=1e-3)
    answers = cluster_of_4.run(by_hand, algorithm="ring", link=link)
    assert_same(joined([result for result, _ in answers]), alone())
    cluster.mesh = Mesh(replica=2, expert=2)
    results = [result for result, _ in cluster.run(by_hand, 0.0, None, ["expert"])]
    for replica in (results[:2], results[2:]):
        assert_same(joined(replica), alone())
    cluster.mesh = Mesh(expert=1)
    ((result, _),) = cluster.run(by_hand)
    assert_same(result, alone())


def test_experts_that_do_not_divide_are_said(cluster):
    cluster.mesh = Mesh(rank=3)
    with pytest.raises(RankError, match="8 experts cannot be divided among 3 ranks"):
        cluster.run(by_hand)
