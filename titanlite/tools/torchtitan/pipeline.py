"""The time of a pipeline: actions cut from traces of its ranks, on the planner's one clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining.stage import _PipelineStageBase

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
)
from titanlite.tools.planner.compose import START, Composition, Done
from titanlite.tools.planner.composition import Segment
from titanlite.tools.planner.events import FROM_RANK_TO_RANK, Event, Trace
from titanlite.tools.planner.fsdp_streams import on_streams
from titanlite.tools.planner.predict import SENDS
from titanlite.tools.planner.recorder import StepRecorder

Marks = list[tuple[int, str, int, int]]
"""Where the events of each action begin, its kind, its stage and its microbatch."""
ACTIONS = {
    "forward_one_chunk": FORWARD,
    "backward_one_chunk": FULL_BACKWARD,
    "backward_weight_one_chunk": BACKWARD_WEIGHT,
    "perform_reduce_grad": REDUCE_GRAD,
    "get_fwd_send_ops": SEND_F,
    "get_bwd_send_ops": SEND_B,
}
"""The methods of PyTorch's stages; the last two are called before they send."""


@contextlib.contextmanager
def marking(recorder: StepRecorder, marks: Marks) -> Iterator[None]:
    """Inside, `marks` gets the actions of this process's stages."""

    def marked(name: str, kind: str) -> Any:
        method = getattr(_PipelineStageBase, name)

        def call(stage: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            own = kind if kwargs.get("full_backward", True) else BACKWARD_INPUT
            number = -1 if kind == REDUCE_GRAD else microbatch
            marks.append((len(recorder.events), own, stage.stage_index, number))
            # No node of autograd tells the recorder that these are of the backward pass.
            recorder.phase = "backward" if kind in (REDUCE_GRAD, SEND_B) else "forward"
            return method(stage, microbatch, *args, **kwargs)

        return patch.object(_PipelineStageBase, name, call)

    with contextlib.ExitStack() as exits:
        for name, kind in ACTIONS.items():
            exits.enter_context(marked(name, kind))
        yield


def composition_of(trace: Trace, marks: Marks, microbatches: int) -> Composition:
    """The actions of a rank whose step has been traced, `microbatches` in each batch."""
    parts: list[tuple[str, int, int, list[Event]]] = []
    ends = [at for at, *_ in marks] + [len(trace.events)]
    seen: set[tuple[str, int, int]] = set()
    for (at, kind, stage, number), end in zip([(0, START, -1, -1), *marks], ends, strict=True):
        of_kind = [(getattr(event, "kind", ""), event) for event in trace.events[at:end]]
        own = [event for kind_of, event in of_kind if kind_of not in FROM_RANK_TO_RANK]
        sent = [event for kind_of, event in of_kind if kind_of == "send"]
        while number >= 0 and (kind, stage, number) in seen:
            # Of a further batch that the step accumulates.
            number += microbatches
        seen.add((kind, stage, number))
        if kind in SENDS:
            # The loss of the last stage can come after the call that would send.
            next(part for part in reversed(parts) if part[0] not in SENDS)[-1].extend(own)
        if sent or kind not in SENDS:
            parts.append((kind, stage, number, sent or own))
    actions = [
        Done(kind, stage, number, Segment(tuple(on_streams(events)), {}, {}))
        for kind, stage, number, events in parts
    ]
    return Composition(trace.rank, trace.coordinates, {}, actions)
