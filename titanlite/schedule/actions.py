"""The data types of a pipeline schedule, used by every other module in this folder.

An `Action` is one cell of a schedule table ("stage 3, forward, microbatch 5", written `3F5`). A
`Schedule` is the whole table and the rank of each stage. The text form is the one used by
`torch.distributed.pipelining`, so tables can be exchanged with its runtime.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from titanlite.errors import TitanliteError
from titanlite.files import shown

FORWARD = "F"
FULL_BACKWARD = "B"
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
OVERLAP_F_B = "OVERLAP_F_B"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"

COMPUTE_KINDS = frozenset({FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B})
COMMUNICATION_KINDS = frozenset({SEND_F, RECV_F, SEND_B, RECV_B})
STAGE_KINDS = frozenset({UNSHARD, RESHARD, REDUCE_GRAD})


class ScheduleError(TitanliteError):
    """A schedule has an unknown name, cannot be read, or cannot run."""


class Action(NamedTuple):
    """One step of a rank: run `kind` on `stage` for `microbatch`.

    `kind` is one of the constants of this module. UNSHARD, RESHARD and REDUCE_GRAD apply to a whole
    stage and have no microbatch. OVERLAP_F_B runs its two `sub_actions`, a forward and a backward,
    together; its own stage is -1.
    """

    stage: int
    kind: str
    microbatch: int | None = None
    sub_actions: "tuple[Action, ...]" = ()

    def __str__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(str, self.sub_actions))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def parts(self) -> "tuple[Action, ...]":
        """The sub-actions of an overlapped pair; for any other action, the action itself."""
        return self.sub_actions or (self,)


@dataclass(frozen=True)
class Schedule:
    """A table of actions, one list per rank; `stage_to_rank[stage]` is the rank of each stage."""

    name: str
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    actions: list[list[Action]]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    def compute(self, rank: int) -> list[Action]:
        """The compute actions of `rank` in order, with each overlapped pair as two actions."""
        row = self.actions[rank]
        if {action.kind for action in row} <= COMPUTE_KINDS - {OVERLAP_F_B}:
            return list(row)
        return [part for action in row if action.kind in COMPUTE_KINDS for part in action.parts]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward pass is split into input and weight gradients."""
        return any(
            part.kind == BACKWARD_INPUT
            for row in self.actions
            for action in row
            for part in action.parts
        )


# Nine digits are more than any real schedule needs; the limit keeps int() fast on bad input.
_SIMPLE = re.compile(
    r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d{0,9})", re.ASCII
)
_OVERLAPPED = re.compile(r"\(([^()]*)\)\s*OVERLAP_F_B")


def parse_action(text: str) -> Action | None:
    """Parse one cell: the action written as `text`, or None for an idle (empty) cell.

    Raises ScheduleError when `text` is neither `[stage][kind][microbatch]` nor
    `([action];[action])OVERLAP_F_B`.
    """
    text = text.strip()
    if not text:
        return None
    if match := _OVERLAPPED.fullmatch(text):
        parts = tuple(parse_action(part) for part in match[1].split(";"))
        if [part.kind for part in parts if part] != [FORWARD, FULL_BACKWARD]:
            raise ScheduleError(
                f"{shown(text)!r}: an overlapped pair must be a forward and a full backward"
            )
        return Action(-1, OVERLAP_F_B, None, tuple(part for part in parts if part))
    match = _SIMPLE.fullmatch(text)
    if not match:
        raise ScheduleError(
            f"{shown(text)!r} is not an action; write [stage][kind][microbatch], such as 2F0 or "
            "1SEND_F3"
        )
    stage, kind, microbatch = int(match[1]), match[2], match[3]
    if (kind in STAGE_KINDS) == bool(microbatch):
        expected = "no microbatch" if kind in STAGE_KINDS else "a microbatch"
        raise ScheduleError(f"{shown(text)!r}: {kind} takes {expected}")
    return Action(stage, kind, int(microbatch) if microbatch else None)
