"""Checkpoints move between plans: weights and optimizer state are equal to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from plans import LARGE_PLANS, PLANS, STEPS, by_num_ranks, load_each, save_each

from titanlite.mesh.launch import run_ranks


def round_trips(plans: Mapping[str, object], folder: Path) -> None:
    """From every plan to every other one, and back."""
    worlds = by_num_ranks(plans)
    own: dict[str, dict[str, str]] = {}
    for num_ranks, names in worlds.items():
        own |= run_ranks(save_each, num_ranks, names, folder)[0]
    (keys,) = {tuple(sorted(state)) for state in own.values()}
    assert len(keys) > 40
    for state in own.values():
        assert state["steps"] == f"[{STEPS}.0]"
    there: dict[str, dict[str, dict[str, str]]] = {}
    for num_ranks, names in worlds.items():
        sources = {
            plan: {other: folder / other / "checkpoint" / f"step-{STEPS}" for other in plans}
            for plan in names
        }
        there |= run_ranks(load_each, num_ranks, names, sources, folder)[0]
    for plan in plans:
        for source in plans:
            assert there[plan][source] == own[source], f"{source} loaded under {plan}"
    for num_ranks, names in worlds.items():
        sources = {
            plan: {
                other: folder / f"{other}-{plan}" / "checkpoint" / f"step-{STEPS}"
                for other in plans
                if other != plan
            }
            for plan in names
        }
        back = run_ranks(load_each, num_ranks, names, sources, None)[0]
        for plan in names:
            for source, state in back[plan].items():
                assert state == own[plan], f"{plan} by way of {source}"


def test_between_stages_and_shards_of_shards(tmp_path):
    round_trips({plan: PLANS[plan] for plan in ("pp2", "tp2_fsdp2")}, tmp_path)


@pytest.mark.slow
def test_every_ordered_pair_of_plans(tmp_path):
    round_trips(PLANS, tmp_path)


@pytest.mark.slow
def test_eight_ranks_with_uneven_shards_of_shards(tmp_path):
    round_trips({"single": None, "fsdp4": None, **LARGE_PLANS}, tmp_path)
