"""Find, in a trace, the casts with which FSDP2 gathers weights in float8.

    recorder = CastRecorder(); recorder.start(job, ...); trace the job -> recorder.casts()

The casts depend on the number of shards, so compose.py puts them into a step, not the trace.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.job import Job
from titanlite.mesh.parallel_dims import EXPERT_SHARDS
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.parallelize.float8.linear import Float8Linear
from titanlite.tools.planner.composition import NOTHING, TOKENS, Float8Cast, segment_of
from titanlite.tools.planner.events import Allocation, Communication, Event
from titanlite.tools.planner.recorder import StepRecorder

EXPERT_AXES = ("ep", EXPERT_SHARDS)


class CastRecorder:
    """The events of casts, by weight: of the cast itself, and of an amax computed in advance.

    Each float8 layer tells when its weight is cast (Float8Linear.while_scaling). `events` has all
    of them, and those of the reductions after the latter.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._casts: dict[str, list[Event]] = {}
        self._amaxes: dict[str, list[Event]] = {}
        self._layers: dict[nn.Module, str] = {}
        self._recorder: StepRecorder | None = None

    def start(self, job: Job, recorder: StepRecorder) -> None:
        """Take the events of this job's float8 layers from `recorder`."""
        self._recorder = recorder
        for name, module in job.parts[0].named_modules():
            if isinstance(module, Float8Linear):
                self._layers[module] = f"{canonical_name(name)}.weight"
                module.while_scaling = partial(self._noting, module)

    @contextlib.contextmanager
    def _noting(self, module: nn.Module, kind: str) -> Iterator[None]:
        assert self._recorder is not None
        events = self._recorder.events
        before = len(events)
        yield
        self.events += events[before:]
        # The first step is not recorded, and later casts are equal.
        found = {"cast": self._casts, "amax": self._amaxes}.get(kind)
        if found is not None:
            found[self._layers[module]] = events[before:]

    def casts(self) -> dict[str, Float8Cast]:
        """The cast of each weight that is gathered in float8."""
        return {
            name: Float8Cast(
                local_part(layer.weight).numel(),
                _is_cut(layer),
                _segment(self._casts[name]),
                _segment(self._amaxes[name]) if name in self._amaxes else NOTHING,
            )
            for layer, name in self._layers.items()
            if isinstance(layer, Float8Linear) and name in self._casts
        }


def over_tokens(event: Event) -> Event:
    """A reduction of an amax over tokens, without the axes of this job; others as they are."""
    if (
        isinstance(event, Communication)
        and event.kind == "all_reduce"
        and event.axis not in ("tp", "world", *EXPERT_AXES)
    ):
        return replace(event, axis=TOKENS)
    return event


def _is_cut(layer: Float8Linear) -> bool:
    """Whether the tp axis shards the layer's weight."""
    weight = layer.weight
    if not isinstance(weight, DTensor):
        return False
    axes = zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True)
    return any(axis == "tp" and placement.is_shard() for axis, placement in axes)


def _segment(events: list[Event]) -> Any:
    blocks = {event.block: "temporary" for event in events if isinstance(event, Allocation)}
    return segment_of(events, blocks, {})
