"""A greedy covering array: choices that together contain every pair of values; torch-free."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Draw = Callable[[random.Random, Choice], Choice]


def pairs(choice: Mapping[str, Any]) -> set[Pair]:
    """Every pair of (feature, value) in a choice."""
    return set(itertools.combinations(sorted(choice.items(), key=lambda item: item[0]), 2))


def cover_pairs(
    features: Mapping[str, Sequence[Any]],
    is_legal: Callable[[Choice], bool],
    seed: int = 0,
    draw: Draw | None = None,
    num_draws: int = 1000,
    num_legal: int = 40,
    start: Sequence[Choice] = (),
) -> list[Choice]:
    """Legal choices, one value per feature, that contain every pair that a legal choice can have.

    Each new choice contains the first missing pair. Of at most `num_legal` legal choices among
    `num_draws` random ones, it is the one with the most missing pairs. A pair without any legal
    draw counts as illegal. `draw` completes a choice of two features at random; by default it draws
    uniformly. The choices of `start` come first.
    """
    random_ = random.Random(seed)

    def evenly(random_: random.Random, start: Choice) -> Choice:
        return {name: random_.choice(values) for name, values in features.items()} | start

    complete = draw or evenly
    left = [
        ((a, value_a), (b, value_b))
        for a, b in itertools.combinations(sorted(features), 2)
        for value_a, value_b in itertools.product(features[a], features[b])
    ]
    cover: list[Choice] = list(start)
    known = set().union(*map(pairs, cover)) if cover else set()
    left = [pair for pair in left if pair not in known]
    while left:
        drawn = (complete(random_, dict(left[0])) for _ in range(num_draws))
        missing = set(left)
        legal = itertools.islice(filter(is_legal, drawn), num_legal)
        best = max(legal, key=lambda choice: len(pairs(choice) & missing), default=None)
        if best is None:
            left.pop(0)
            continue
        cover.append(best)
        shown = pairs(best)
        left = [pair for pair in left if pair not in shown]
    return cover
