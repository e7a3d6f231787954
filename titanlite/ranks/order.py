"""A check that all ranks of a group call the same collectives, from the same lines, in one order.

If one rank calls two collectives of the same size in the opposite order, the ranks exchange wrong
numbers and nothing fails. The flight recorder holds the line of code of each call, and the ranks
compare their calls at each step.
"""

from operator import attrgetter
from typing import Any

import torch.distributed as dist

from titanlite.errors import OrderError
from titanlite.ranks.hang_state import group_ranks, names_of, recorded_calls
from titanlite.ranks.peers import Peers
from titanlite.ranks.report import Call, RankState, find_astray

AFTER = "; this step did not change the weights"


class OrderCheck:
    """Compares the calls of the ranks since the last comparison.

    Every rank must create it and call it. `axes` has the process groups to compare, group -> axis;
    the default group is compared, too.
    """

    def __init__(self, axes: dict[str, str]) -> None:
        self._axes = axes
        # Only training's groups: a background save has its own group, and its order varies.
        everyone = dist.distributed_c10d._get_default_group().group_name
        self._names = {name for group in (*axes, everyone) for name in names_of(group)}
        self._compared: dict[str, int] = {}
        # A separate group: the order of calls in the other groups may be wrong.
        group = dist.new_group(backend="gloo", group_desc="order check")
        assert isinstance(group, dist.ProcessGroup)
        self._peers = Peers(group)

    def __call__(self) -> None:
        """Raises the same OrderError on all ranks, with the first call that differs."""
        new = self._new_calls()
        of_call = attrgetter("number", "operation", "num_elements", "dtype", "site")
        tags = {name: list(map(of_call, new.get(name, ()))) for name in self._names}
        if not _are_alike(self._peers.gathered(tags)):
            self._find_difference(new)
        for name, calls in new.items():
            self._compared[name] = calls[-1].number

    def _find_difference(self, new: dict[str, list[Call]]) -> None:
        state = RankState(
            dist.get_rank(),
            calls=[call for calls in new.values() for call in calls],
            groups=group_ranks(self._axes),
        )
        everyone = self._peers.gathered(state)
        groups = {name: group for state in everyone for name, group in state.groups.items()}
        states = {state.rank: state for state in everyone}
        astray = find_astray(states, groups, by_site=True)
        if astray is not None:
            raise OrderError(f"rank {astray.rank}: {astray.text}{AFTER}")
        for name, (axis, ranks) in groups.items():
            counts = {rank: states[rank].last_number(name) for rank in ranks}
            if len(set(counts.values())) > 1:
                fewest = min(counts, key=lambda rank: (counts[rank], rank))
                raise OrderError(
                    f"rank {fewest}: called {counts[fewest]} collectives over {axis} so far; "
                    f"another rank called {max(counts.values())}{AFTER}"
                )

    def _new_calls(self) -> dict[str, list[Call]]:
        """This rank's calls since the last comparison, by group."""
        new: dict[str, list[Call]] = {}
        for call in recorded_calls():
            if call.group in self._names and call.number > self._compared.get(call.group, 0):
                new.setdefault(call.group, []).append(call)
        return new


def _are_alike(everyone: list[dict[str, list[Any]]]) -> bool:
    """Whether all ranks of each group made the same calls in it."""
    names = {name for of_rank in everyone for name in of_rank}
    return all(
        len({str(of_rank[name]) for of_rank in everyone if name in of_rank}) == 1 for name in names
    )
