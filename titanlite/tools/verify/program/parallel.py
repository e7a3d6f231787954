"""On a rank: runs the caller's parallel code and measures it against the reference's record."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from titanlite.errors import ConfigError
from titanlite.modules.shards import local_part
from titanlite.ranks.world import World
from titanlite.tools.verify.agreement import (
    HeldParts,
    buffer_agreements,
    digest_of,
    gradient_agreements,
    is_pending,
    state_agreements,
    weight_agreements,
)
from titanlite.tools.verify.outputs import Outputs, recorded
from titanlite.tools.verify.program.batches import digest_of_batch, find_part, part_of_batch
from titanlite.tools.verify.program.building import Built, build, cast, in_dtype
from titanlite.tools.verify.program.grid import RankGrid
from titanlite.tools.verify.program.local_parts import find_held
from titanlite.tools.verify.program.reference import ReferenceRecord
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.program.tracing import (
    NARROW_TOLERANCE,
    TOLERANCES,
    PartTrace,
    Tracer,
    save_part,
)
from titanlite.tools.verify.record import RankRun, RankStep
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.sums import gathered


@dataclass
class RankReport:
    """One rank's measurements."""

    run: RankRun
    places: dict[str, str]
    """Parameter -> a digest of the elements that the rank holds, equal for replicas."""
    losses: list[float | None]
    """What each step returned, None where a rank computes no loss."""
    parts: list[str]
    """A digest of this rank's part of each batch."""
    traces: dict[int, PartTrace] = field(default_factory=dict)
    """The steps in which some rank's numbers differ, recorded in detail."""


def run_parallel(world: World, packed: bytes, folder: str, record: ReferenceRecord) -> RankReport:
    """Train the parallel code on every batch; every rank of the world must call this."""
    request: Request = cloudpickle.loads(packed)
    try:
        with in_dtype(request.dtype):
            return _Measuring(world, request, folder, record).run()
    finally:
        gc.collect()


def run_again(
    world: World, packed: bytes, folder: str, record: ReferenceRecord, dtype: str
) -> RankReport:
    """The reference once more, from weights that differ in their last bit or in `dtype`.

    Its differences from the first run are the rounding error of the reference.
    """
    request: Request = cloudpickle.loads(packed)
    again = replace(
        request,
        parallel=lambda: request.reference(),
        grid=RankGrid({"world": 1}),
        split=None,
        step=None,
        shard=None,
        rename=None,
        modules=False,
        copy_weights=True,
        dtype=dtype,
    )
    try:
        with in_dtype(dtype):
            is_same = dtype == request.dtype
            return _Measuring(world, again, folder, record, perturbs=is_same, traces=False).run()
    finally:
        gc.collect()


class _Measuring:
    """One rank's run of the parallel code."""

    def __init__(
        self,
        world: World,
        request: Request,
        folder: str,
        record: ReferenceRecord,
        *,
        perturbs: bool = False,
        traces: bool = True,
    ) -> None:
        self.world, self.request, self.folder, self.record = world, request, folder, record
        self.grid, self.perturbs, self.traces = request.grid, perturbs, traces
        self.tolerance = TOLERANCES[request.dtype]
        if record.narrowed:
            self.tolerance = max(self.tolerance, NARROW_TOLERANCE)

    def run(self) -> RankReport:
        request, world = self.request, self.world
        mesh = self._open_mesh()
        batches = [cast(batch, request.dtype) for batch in request.batches]
        parts = [part_of_batch(b, request.split, mesh, self.grid, world.rank) for b in batches]
        built = build(request, mesh, is_reference=False)
        # The caller's groups exist only now.
        world.set_timeout(self.request.timeout_seconds / 2, "timeout_seconds / 2")
        start = load(self.folder, 0)["weights"]
        self._start(built, start)
        shapes = {name: whole.shape for name, whole in start.items()}
        with built.parameters(writes=request.copy_weights) as parameters:
            self._check_names(parameters, shapes)
            held = find_held(parameters, shapes, request.shard, self.grid, world.rank)
            if request.copy_weights:
                self._copy(held, start)
        is_whole = self._is_whole(held)
        with built.parameters():
            report = RankReport(
                RankRun(
                    world.rank,
                    self.grid.coordinates(world.rank),
                    {},
                    (),
                    {name: digest_of(one.part_of(start[name])) for name, one in held.items()},
                    [RankStep(weights=weight_agreements(held, start))],
                ),
                {name: one.place for name, one in held.items()},
                [],
                [],
            )
        # A missing seed must show up: ranks on different machines differ in this too.
        torch.manual_seed(hash((world.rank, time.monotonic_ns())) % 2**32)
        for step, (batch, part) in enumerate(zip(batches, parts, strict=True), 1):
            tracer = Tracer(
                self.grid,
                world.rank,
                mesh,
                find_part(batch, request.split, mesh, self.grid, world.rank),
                self.record.modules,
                self.tolerance,
                world.device,
            )
            digest = digest_of_batch(part)
            report.parts.append(digest)
            known = load(self.folder, step)
            found = RankStep()
            with self._recorded(built, is_whole) as kept:
                report.losses.append(built.run_step(part))
            with built.parameters() as parameters:
                pending = tuple(n for n, p in parameters.items() if is_pending(p.grad))
                report.run.pending = report.run.pending or pending
                found.gradients = gradient_agreements(held, known["gradients"], zero_is_none=True)
                trace = self._trace(tracer, kept, known, held, found, step, part, digest)
                if trace is not None:
                    report.traces[step] = trace
            found.norm = built.clip()
            built.optimizer.step()
            with built.parameters():
                found.weights = weight_agreements(held, known["weights"])
            if not built.is_flat:
                found.state = state_agreements(
                    built.optimizer, held, known["state"], of_both_only=True
                )
            found.buffers = buffer_agreements(built.buffers, known["buffers"], of_both_only=True)
            report.run.steps.append(found)
            built.optimizer.zero_grad(set_to_none=True)
            for module in built.modules:
                module.zero_grad(set_to_none=True)
        return report

    def _open_mesh(self) -> Any:
        degrees = self.grid.degrees
        mesh = init_device_mesh(
            self.world.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
        )
        self.world.set_timeout(self.request.timeout_seconds / 2, "timeout_seconds / 2")
        self.world.name_groups({mesh.get_group(axis).group_name: axis for axis in degrees})
        return mesh

    def _start(self, built: Built, start: Mapping[str, Tensor]) -> None:
        if built.is_flat and any(
            getattr(module, "_use_orig_params", True) is False
            for root in built.modules
            for module in root.modules()
        ):
            raise ConfigError(
                "parallel: FullyShardedDataParallel hides the gradients of single parameters; "
                "give it use_orig_params=True"
            )

    def _check_names(
        self, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size]
    ) -> None:
        """Raises ConfigError, on every rank, if no rank holds a parameter of the reference."""
        names = {name for of_rank in gathered(list(parameters)) for name in of_rank}
        if unknown := [name for name in parameters if name not in shapes]:
            find_held({n: parameters[n] for n in unknown}, shapes, None, self.grid, self.world.rank)
        others = {name: own for own in self.record.tied for name in own}
        missing = [n for n in shapes if n not in names and not names & set(others.get(n, ()))]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"parallel: no rank has the parameter {missing[0]}{more} of the reference, which "
                f"has {len(shapes)}; return every module of the rank, or give rename="
            )

    def _is_whole(self, held: HeldParts) -> bool:
        """Whether this rank's module is the whole model: one that holds every parameter."""
        others = {name: own for own in self.record.tied for name in own}
        start = load(self.folder, 0)["weights"]
        return all(name in held or held.keys() & set(others.get(name, ())) for name in start)

    @torch.no_grad()
    def _copy(self, held: HeldParts, start: Mapping[str, Tensor]) -> None:
        torch.manual_seed(0)
        for name, one in held.items():
            own = local_part(one.parameter)
            own.copy_(one.part_of(start[name]))
            if self.perturbs and own.is_floating_point():
                own.mul_(1 + torch.finfo(own.dtype).eps * (2 * torch.rand_like(own) - 1))

    def _recorded(self, built: Built, is_whole: bool) -> contextlib.AbstractContextManager[Outputs]:
        if not self.request.modules:
            return contextlib.nullcontext(Outputs())
        is_alone = is_whole and len(built.modules) == 1
        return recorded(built.modules, [is_alone] * len(built.modules), built.name_of)

    def _trace(
        self,
        tracer: Tracer,
        kept: Outputs,
        known: Mapping[str, Any],
        held: HeldParts,
        found: RankStep,
        step: int,
        part: Any,
        digest: str,
    ) -> PartTrace | None:
        """A detailed recording of the step if any rank's gradients differ."""
        if not self.traces:
            return None
        wrong = [n for n, a in found.gradients.items() if not a.difference <= self.tolerance]
        trace = tracer.trace(kept, known, held, wrong)
        everyone = gathered((digest, wrong))
        if any(names for _, names in everyone) and len({d for d, _ in everyone}) > 1:
            names = sorted({name for _, names in everyone for name in names} & held.keys())
            path = Path(self.folder) / f"part{self.world.rank}_{step}.pt"
            with contextlib.suppress(Exception):
                trace.file = save_part(path, self.world.rank, part, digest, held, names)
        return trace
