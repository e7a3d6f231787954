"""What a layout lets the ranks of a ring send."""

from titanlite.modules.attention.layout import Layout


def num_keys_sent(layout: Layout, rank: int, n: int, causal: bool) -> int:
    """The keys (and values) that `rank` sends in the forward pass; in the backward pass, again."""
    return sum(
        layout.num_keys_carried(layout.holder(rank, 1 - hop), hop, n, causal)
        for hop in range(1, layout.num_ranks)
    )
