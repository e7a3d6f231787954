"""Find, in a trace, the casts with which FSDP2 gathers weights in float8.

    with CastRecorder() as casts: trace a job -> casts.pieces(): a Float8Cast of each weight

The casts depend on the number of shards, so compose.py puts them into a step, not the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.distributed.tensor import DTensor

from titanlite import job as job_module
from titanlite.job import Job
from titanlite.mesh.parallel_dims import EXPERT_SHARDS
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part
from titanlite.parallelize.float8 import gather as float8_gather
from titanlite.parallelize.float8.gather import Float8Shard
from titanlite.parallelize.float8.linear import Float8Linear
from titanlite.tools.planner.composition import NOTHING, TOKENS, Float8Cast, segment_of
from titanlite.tools.planner.events import Communication, Event, Memory
from titanlite.tools.planner.recorder import Recorder

EXPERT_AXES = ("ep", EXPERT_SHARDS)


class CastRecorder:
    """The events of casts, by weight: of the cast itself, and of an amax computed in advance.

    `events` has all of them, and those of the reductions after the latter.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._casts: dict[str, list[Event]] = {}
        self._amaxes: dict[str, list[Event]] = {}
        self._layers: dict[nn.Module, str] = {}
        self._recorder: Recorder | None = None

    def start(self, job: Job, recorder: Recorder) -> None:
        """Take the events of this job's float8 layers from `recorder`."""
        self._recorder = recorder
        for name, module in job.parts[0].named_modules():
            if isinstance(module, Float8Linear):
                self._layers[module] = f"{canonical_name(name)}.weight"

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the events of casts are noted; enter it before the job is built."""
        gather = Float8Shard.fsdp_pre_all_gather
        amax_of_shard = float8_gather.amax_of_shard
        precompute_scales = job_module.precompute_scales

        def noted_gather(
            shard: Float8Shard, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
        ) -> Any:
            arguments = (shard, mesh, size, stride, module, policy)
            return self._note(self._casts, module, lambda: gather(*arguments))

        def noted_amax(fsdp_param: Any) -> Any:
            module = fsdp_param._module_info.module
            return self._note(self._amaxes, module, lambda: amax_of_shard(fsdp_param))

        def noted_precompute(model: nn.Module) -> None:
            self._note({}, None, lambda: precompute_scales(model))

        with (
            patch.object(Float8Shard, "fsdp_pre_all_gather", noted_gather),
            patch.object(float8_gather, "amax_of_shard", noted_amax),
            patch.object(job_module, "precompute_scales", noted_precompute),
        ):
            yield

    def _note(self, found: dict[str, list[Event]], module: Any, call: Callable[[], Any]) -> Any:
        if self._recorder is None:
            return call()
        events = self._recorder.events
        before = len(events)
        result = call()
        self.events += events[before:]
        # The first step is not recorded, and later casts are equal.
        if module is not None:
            found[self._layers[module]] = events[before:]
        return result

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
    blocks = {event.block: "temporary" for event in events if isinstance(event, Memory)}
    return segment_of(events, blocks, {})
