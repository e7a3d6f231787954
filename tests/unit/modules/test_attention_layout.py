"""Layouts: shard and unshard, tiles that equal the causal mask, work and traffic."""

import pytest
import torch
from layouts import num_keys_sent

from titanlite.errors import ConfigError
from titanlite.modules.attention import LAYOUTS, make_layout

every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_size = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])


@every_layout
@every_size
def test_shards_are_a_permutation_and_undo_themselves(name, num_ranks):
    layout = make_layout(name, num_ranks)
    tokens = torch.randn(2, 6 * num_ranks, 3)
    shards = [layout.shard(tokens, 1, rank) for rank in range(num_ranks)]
    assert {shard.shape for shard in shards} == {(2, 6, 3)}
    assert torch.equal(layout.unshard(shards, 1), tokens)
    # Positions are sharded like tokens, so they show where each token was.
    positions = torch.arange(6 * num_ranks)
    for rank in range(num_ranks):
        held = layout.positions(rank, 6 * num_ranks)
        assert torch.equal(held, layout.shard(positions, 0, rank))
        assert torch.equal(held, held.sort().values)


def test_who_holds_what():
    held = {
        name: [make_layout(name, 2).positions(rank, 8).tolist() for rank in range(2)]
        for name in LAYOUTS
    }
    assert held == {
        "headtail": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "none": [[0, 1, 2, 3], [4, 5, 6, 7]],
    }


def pairs_of(tiles, n):
    """How often each (query, key) pair of a block is covered: int [n, n]."""
    covered = torch.zeros(n, n, dtype=torch.int64)
    for tile in tiles:
        part = torch.ones_like(covered[tile.queries, tile.keys])
        if tile.causal:
            assert part.size(0) == part.size(1)
            part = part.tril()
        assert int(part.sum()) == tile.num_pairs
        covered[tile.queries, tile.keys] += part
    return covered


@every_layout
@every_size
@pytest.mark.parametrize("n", [2, 6, 14])
def test_tiles_cover_exactly_what_the_causal_mask_leaves(name, num_ranks, n):
    layout = make_layout(name, num_ranks)
    for query_rank in range(num_ranks):
        queries = layout.positions(query_rank, num_ranks * n)
        for key_rank in range(num_ranks):
            keys = layout.positions(key_rank, num_ranks * n)
            mask = (keys[None, :] <= queries[:, None]).long()
            tiles = layout.tiles(query_rank, key_rank, n, causal=True)
            assert torch.equal(pairs_of(tiles, n), mask)
            halved = [part for tile in tiles for part in tile.split(3)]
            assert torch.equal(pairs_of(halved, n), mask)
            assert all(part.num_pairs for part in halved)
            everything = layout.tiles(query_rank, key_rank, n, causal=False)
            assert torch.equal(pairs_of(everything, n), torch.ones_like(mask))


@every_size
def test_work_is_equal_but_for_contiguous(num_ranks):
    n = 512
    total = num_ranks * n * (num_ranks * n + 1) // 2
    ranks = range(num_ranks)

    def num_pairs(layout, rank):
        return sum(t.num_pairs for other in ranks for t in layout.tiles(rank, other, n, True))

    pairs = {
        name: [num_pairs(make_layout(name, num_ranks), rank) for rank in ranks] for name in LAYOUTS
    }
    assert all(sum(per_rank) == total for per_rank in pairs.values())
    assert pairs["headtail"] == [total // num_ranks] * num_ranks
    assert max(pairs["striped"]) <= 1.02 * min(pairs["striped"])
    # Rank i: i whole blocks and one triangle.
    assert pairs["none"] == [i * n * n + n * (n + 1) // 2 for i in range(num_ranks)]


@every_layout
@every_size
@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_carries_what_is_needed_and_no_more(name, num_ranks, causal):
    layout, n = make_layout(name, num_ranks), 8
    for owner in range(num_ranks):
        carried = [layout.num_keys_carried(owner, hop, n, causal) for hop in range(1, num_ranks)]
        needed = [
            max((tile.keys.stop for tile in layout.tiles(rank, owner, n, causal)), default=0)
            for rank in (layout.holder(owner, hop) for hop in range(1, num_ranks))
        ]
        # Ranks that need the most keys come first, so none is carried only for a later rank.
        assert carried == needed
        assert layout.num_keys_carried(owner, num_ranks, n, causal) == 0


@every_size
def test_keys_sent_by_formula(num_ranks):
    n, c = 8, num_ranks

    def sent(name, causal):
        layout = make_layout(name, c)
        return [num_keys_sent(layout, rank, n, causal) for rank in range(c)]

    assert all(sent(name, causal=False) == [(c - 1) * n] * c for name in LAYOUTS)
    # Rank r sends whole blocks of ranks >= r, and half blocks of ranks < r - 1.
    halves = [2 * (c - r) + (r - 1) if r else c - 1 for r in range(c)]
    assert sent("headtail", causal=True) == [half * n // 2 for half in halves]
    assert sum(sent("headtail", causal=True)) * 4 == 3 * c * (c - 1) * n
    # Keys travel up to the last rank only.
    assert sent("none", causal=True) == [r * n + n if r < c - 1 else 0 for r in range(c)]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_tokens", "message"),
    [
        ("headtail", 4, 12, r"12 tokens cannot be split into the 8 equal chunks .* use 8 or 16"),
        ("headtail", 4, 4, r"4 tokens cannot be split into the 8 .*; use 8 tokens, or fewer ranks"),
        ("striped", 3, 2, r"sequence length: 2 tokens cannot be split into the 3 equal chunks"),
        ("none", 2, 7, r"7 tokens .* none layout needs on 2 ranks; use 6 or 8 tokens"),
        ("none", 2, 0, r"0 tokens"),
    ],
)
def test_sequences_that_cannot_be_shared_out(name, num_ranks, num_tokens, message):
    layout = make_layout(name, num_ranks)
    with pytest.raises(ConfigError, match=message):
        layout.shard(torch.zeros(1, num_tokens), 1, 0)


def test_unknown_layout():
    with pytest.raises(ConfigError, match=r'layout: "zigzag" .* "headtail", "striped", "none"'):
        make_layout("zigzag", 2)
