"""Checkpoints move between plans: weights and optimizer state are equal to the bit."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from plans import (
    EXPERT_PLANS,
    LARGE_PLANS,
    PLANS,
    STEPS,
    by_num_ranks,
    in_world,
    load_each,
    save_each,
)

from titanlite.ranks.launch import spawn

States = dict[str, dict[str, dict[str, str]]]


def there(plans: Iterable[str], folder: Path) -> dict[str, dict[str, Path]]:
    """For each plan, what every plan saved."""
    of = {other: folder / other / "checkpoint" / f"step-{STEPS}" for other in plans}
    return dict.fromkeys(plans, of)


def back(plans: Iterable[str], folder: Path) -> dict[str, dict[str, Path]]:
    """For each plan, what every other one saved after having loaded from it."""
    return {
        plan: {
            other: folder / f"{other}-{plan}" / "checkpoint" / f"step-{STEPS}"
            for other in plans
            if other != plan
        }
        for plan in plans
    }


def check(own: dict[str, dict[str, str]], loaded: States, returned: States) -> None:
    (names,) = {tuple(sorted(state)) for state in own.values()}
    assert len(names) > 40
    for plan, state in own.items():
        assert state["steps"] == f"[{STEPS}.0]"
        assert loaded[plan] == own, f"loaded under {plan}"
        for other, found in returned[plan].items():
            assert found == state, f"{plan} by way of {other}"
    assert loaded.keys() == returned.keys() == own.keys()


def test_between_shards_of_shards_and_stages_of_shards(tmp_path):
    plans = ["tp2_fsdp2", "pp2_fsdp2"]
    own, loaded, returned = spawn(
        in_world,
        4,
        (save_each, plans, tmp_path),
        (load_each, plans, there(plans, tmp_path), tmp_path),
        (load_each, plans, back(plans, tmp_path), None),
    )[0]
    check(own, loaded, returned)


def round_trips(plans: Iterable[str], folder: Path) -> None:
    """From every plan to every other one, on its own number of ranks, and back."""
    worlds = by_num_ranks(dict.fromkeys(plans))
    own: dict[str, dict[str, str]] = {}
    loaded: States = {}
    returned: States = {}
    for num_ranks, names in worlds.items():
        own |= spawn(in_world, num_ranks, (save_each, names, folder))[0][0]
    for num_ranks, names in worlds.items():
        call = (load_each, names, there(plans, folder), folder)
        loaded |= spawn(in_world, num_ranks, call)[0][0]
    for num_ranks, names in worlds.items():
        call = (load_each, names, back(plans, folder), None)
        returned |= spawn(in_world, num_ranks, call)[0][0]
    check(own, loaded, returned)


@pytest.mark.slow
def test_every_ordered_pair_of_plans(tmp_path):
    round_trips(PLANS, tmp_path)


@pytest.mark.slow
def test_eight_ranks_with_uneven_shards_of_shards(tmp_path):
    round_trips(["single", "fsdp4", *LARGE_PLANS], tmp_path)


@pytest.mark.slow
def test_between_any_two_degrees_of_expert_parallelism(tmp_path):
    round_trips(EXPERT_PLANS, tmp_path)
