"""On a rank: runs the caller's parallel code and measures it against the reference's record."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from titanlite import pickles
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid
from titanlite.modules.shards import fsdp_groups, local_part
from titanlite.ranks.hang_state import TORCH
from titanlite.ranks.world import World
from titanlite.tools.verify.agreement import agreement, digest_of, is_pending
from titanlite.tools.verify.differences import NARROW_TOLERANCE
from titanlite.tools.verify.events import Events, OperatorWatch
from titanlite.tools.verify.evidence import WRONG
from titanlite.tools.verify.perturbation import Perturbation
from titanlite.tools.verify.program.batches import digest_of_batch, find_part, part_of_batch
from titanlite.tools.verify.program.building import Built, build, cast, clean_up, in_dtype
from titanlite.tools.verify.program.call_contents import added, carried, left_out
from titanlite.tools.verify.program.code_trace import (
    CodeTracer,
    has_elements_of,
    same_rows,
    save_part,
)
from titanlite.tools.verify.program.gradient_modes import Cleared, Lines
from titanlite.tools.verify.program.lines import wrong_lines
from titanlite.tools.verify.program.lines_backward import wrong_gradient
from titanlite.tools.verify.program.local_parts import check_names, find_parts
from titanlite.tools.verify.program.loss_terms import padding_counted, wrong_terms
from titanlite.tools.verify.program.request import Request
from titanlite.tools.verify.program.saved import watching_saved
from titanlite.tools.verify.program.step_trace import lines_of_step, watch_step
from titanlite.tools.verify.program.values import Place, Values, load_values
from titanlite.tools.verify.program.weights import changed, fingerprint, options_apart, save_update
from titanlite.tools.verify.record import (
    CodeRun,
    ModelRun,
    RankStep,
    RankTrace,
    WrongLine,
    is_input,
    module_of,
)
from titanlite.tools.verify.step_files import load
from titanlite.tools.verify.subject import LocalParts, Subject
from titanlite.tools.verify.tracing import TOLERANCES, gathered
from titanlite.tools.verify.watching import StepWatch, listening
from titanlite.tools.verify.wording import listed

# A layer of several, such as "layers.4" of "layers.4.norm.weight".
NUMBERED = re.compile(r"(?:.+?\.)?\d+(?=\.)")
# The steps whose wrong weights are saved.
MOST_UPDATES = 3
# The least tolerance of outputs if part of the model computes in a narrower dtype.
IF_NARROWED = 1e-4


def run_parallel(
    world: World,
    packed: bytes,
    folder: str,
    record: ModelRun,
    watched: int | None = None,
    completed: tuple[Place, str, str] | None = None,
    *,
    records: bool = True,
    loss: float = math.nan,
) -> CodeRun:
    """Train the parallel code on every batch; every rank of the world must call this.

    With `watched`, only up to this step, in which the lines of the caller's code are noted. Then a
    value may be `completed`: reduced over an axis, to see what that does to an event. Without
    `records`, what modules receive and return is not recorded, nor anything else for a diagnosis.
    `loss` is that of all ranks in the step that is watched.
    """
    request: Request = pickles.loads(packed)
    measuring = Measuring(world, request, folder, record, watched=watched, traces=records)
    measuring.completed, measuring.counts, measuring.loss = completed, True, loss
    return measuring.run()


def run_again(
    world: World, packed: bytes, folder: str, record: ModelRun, dtype: str, perturbed: int = 0
) -> CodeRun:
    """The reference once more, from weights that differ in their last bit or in `dtype`.

    Its differences from the first run are the rounding error of the reference. With `perturbed`,
    it starts from the same weights, and those of each step are perturbed for its two passes.
    """
    request: Request = pickles.loads(packed)
    again = replace(
        request,
        parallel=lambda: request.reference(),
        grid=Grid(world=1),
        split=None,
        step=request.reference_step,
        parallel_loss=None,
        shard=None,
        rename=None,
        modules=False,
        copy_weights=True,
        dtype=dtype,
    )
    perturbs = dtype == request.dtype and not perturbed
    measuring = Measuring(world, again, folder, record, perturbs=perturbs, traces=False)
    measuring.perturbed = perturbed
    return measuring.run()


class Measuring:
    """One rank's run of the parallel code."""

    def __init__(
        self,
        world: World,
        request: Request,
        folder: str,
        record: ModelRun,
        *,
        perturbs: bool = False,
        traces: bool = True,
        watched: int | None = None,
    ) -> None:
        self.world, self.request, self.folder, self.record = world, request, folder, record
        self.watched = watched
        self.grid, self.perturbs, self.traces = request.grid, perturbs, traces
        self.perturbed = 0
        # Whether it counts what the ranks send.
        self.counts, self.loss = False, math.nan
        self.completed: tuple[Place, str, str] | None = None
        self.through: Lines | None = None
        self.old_buffers: Mapping[str, Tensor] = {}
        # Of outputs, and of gradients that are not looked at again.
        self.tolerance = TOLERANCES[getattr(torch, request.dtype)]
        if record.narrowed:
            self.tolerance = max(self.tolerance, IF_NARROWED)

    def run(self) -> CodeRun:
        """Train the code on every batch, under the comparison's dtype."""
        try:
            with in_dtype(self.request.dtype):
                return self._run()
        finally:
            clean_up()

    def _run(self) -> CodeRun:
        request, world = self.request, self.world
        mesh = self._open_mesh()
        batches = [cast(batch, request.dtype) for batch in request.batches]
        parts = [part_of_batch(b, request.split, mesh, self.grid, world.rank) for b in batches]
        built = build(request, mesh, is_reference=False)
        # The caller's groups exist only now.
        world.set_timeout(self.request.timeout_seconds / 2, "timeout_seconds / 2")
        start = load(self.folder, 0)["weights"]
        self._check_flat(built)
        built.unwrap(start.keys())
        with built.parameters(writes=request.copy_weights) as parameters:
            self._check_names(parameters, start)
            parameters = {n: p for n, p in parameters.items() if not request.leaves_out(n)}
            local = find_parts(parameters, start, request, self.grid, world.rank)
            if request.copy_weights:
                self._copy(local, start)
        subject = self._subject(built, local, mesh)
        with built.parameters():
            run = self._start_run(subject, start)
        _note_wrappers(run, built, local)
        after = None if built.is_flat else fingerprint(local)
        # A missing seed must show up: ranks on different machines differ in this too.
        torch.manual_seed(hash((world.rank, time.monotonic_ns())) % 2**32)
        before: tuple[WrongLine, ...] = ()
        for step, (batch, part) in enumerate(zip(batches, parts, strict=True), 1):
            where = find_part(batch, request.split, mesh, self.grid, world.rank)
            run.cells.append(None if where is None else where.cells)
            tracer = CodeTracer(
                subject, world.rank, self.grid, self.record.trace, where, request, self.tolerance
            )
            digest = digest_of_batch(part)
            run.parts.append(digest)
            known, found = load(self.folder, step), RankStep()
            perturbation = Perturbation(request.dtype, self.perturbed, step)
            if self.perturbed:
                perturbation.perturb(built.own_parameters.values())
                part = perturbation.inputs(part)
            is_seen = step == min(2, len(parts)) and not built.is_compiled
            looks = is_seen and self.counts and self.watched is None
            watch = StepWatch(subject.groups, built.own_parameters, [part]) if looks else None
            kept = self._events(built, subject, step)
            with self._observing(subject, kept, step), watch.seeing() if watch else nullcontext():
                run.losses.append(built.run_step(part))
            run.changed[step] = changed(after, kept.start)
            perturbation.restore()
            if step == self.watched and self.through is not None:
                self._note_gradients(self.through, tracer, known)
                return run
            if step == self.watched:
                seen = run.traces[step] = self._lines(tracer, kept, known)
                if self.completed is None:
                    watch_step(built, tracer, known["gradients"], self._values_of(step), seen)
                    seen.step_lines = *before, *seen.step_lines
                return run
            with built.parameters() as parameters:
                pending = tuple(n for n, p in parameters.items() if is_pending(p.grad))
                run.pending = run.pending or pending
                run.unsynchronized = run.unsynchronized or _unsynchronized(built, parameters)
                found.gradients = subject.compare_gradients(known["gradients"])
                trace = self._trace(tracer, kept, known, found, step, part, digest)
                if trace is not None:
                    run.traces[step] = trace
            number = len(watch.traffic().sent) if watch else 0
            with watch.seeing() if watch else nullcontext():
                found.norm = built.clip()
                run.rates.append(built.rate)
                before = self._step(built, tracer, step)
            if watch:
                run.traffic = replace(watch.traffic(), part=digest, num_of_gradients=number)
            after = None if built.is_flat else fingerprint(local)
            with built.parameters():
                found.weights = subject.compare_weights(known["weights"])
                self._save_update(subject, found, step, run, known)
            if not built.is_flat:
                found.state = subject.compare_state(known["state"])
                run.states_left = subject.state().keys() & known["state"].keys() - found.state
            self._compare_buffers(subject, known["buffers"], run, found)
            run.steps.append(found)
            built.forget_gradients()
        return run

    def _events(self, built: Built, subject: Subject, step: int) -> Events:
        """What records a step."""
        is_watched = step == self.watched
        kept = Events()
        if self.through is not None and is_watched:
            kept, known = self.through.kept, load(self.folder, step)["output_gradients"]
            self.through.size = sum(one.numel() for one in known.get(self.through.event, ())[:1])
        kept.arguments = self.record.trace.arguments
        outputs = (event for event in self.record.trace.events if not is_input(event))
        kept.num_known = Counter(map(module_of, outputs))
        if self.completed is not None and is_watched:
            place, axis, _ = self.completed
            kept.values.completed = place, subject.groups[axis]
        if not built.is_flat:
            kept.at_start = functools.partial(fingerprint, subject.local)
        return kept

    def _step(self, built: Built, tracer: CodeTracer, step: int) -> tuple[WrongLine, ...]:
        """Make a step; returns its lines that read a share, if the next one is watched."""
        if step + 1 == self.watched and self.completed is None and self.through is None:
            return lines_of_step(built, tracer, self._values_of(step))
        built.optimizer.step()
        return ()

    def _values_of(self, step: int) -> Values:
        """The values of the optimizer's step on one process."""
        return load_values(self.folder, f"optimizer{step}")

    def _start_run(self, subject: Subject, start: Mapping[str, Tensor]) -> CodeRun:
        local, weights = subject.local, subject.compare_weights(start)
        # Of buffers, only whether a step changes them is asked.
        found = {name: local_part(one.detach()) for name, one in subject.buffers().items()}
        buffers = subject.compare_buffers(found, found)
        wrong = [name for name, one in weights.items() if one.error and self.traces]
        in_other_order = tuple(n for n in wrong if same_rows(local[n].parameter, start[n]))
        others = [name for name in wrong if name not in in_other_order]
        return CodeRun(
            self.world.rank,
            self.grid.coordinates(self.world.rank),
            {},
            (),
            {name: digest_of(one.part_of(start[name])) for name, one in local.items()},
            [RankStep(weights=weights, buffers=buffers)],
            places={name: one.place for name, one in local.items()},
            sizes={name: one.shape.numel() for name, one in local.items()},
            cut_dims={
                name: tuple(d for d in range(len(shape)) if shape[d] < one.shape[d])
                for name, one in local.items()
                if len(shape := local_part(one.parameter).shape) == len(one.shape) > 1
            },
            shuffled=tuple(n for n in others if has_elements_of(local[n].parameter, start[n])),
            in_other_order=in_other_order,
        )

    def _lines(self, tracer: CodeTracer, kept: Events, known: Mapping[str, Any]) -> RankTrace:
        """The lines that were noted in a watched step, and the first whose result is wrong."""
        trace, number = tracer.lines(kept), max(map(len, kept.first.values()), default=1)
        if self.completed is not None:
            event = self.completed[2]
            if event in kept.first and event in known["outputs"]:
                compared = tracer.compare(event, kept.first[event], known["outputs"][event])
                trace.events |= {event: compared[0]} if compared is not None else {}
            return trace
        known = tracer.in_order(kept, known)
        if any(gathered(tracer.order)):
            # Of both sides the values of one line are then of different calls.
            return trace
        if self.watched and self.watched > 1:
            old = load(self.folder, -self.watched)["outputs"]
            both = ((e, tracer.compare(e, kept.first[e], old[e])) for e in old.keys() & kept.first)
            trace.outdated = frozenset(e for e, one in both if one and not one[0].wrong_calls)
        for event in kept.first:
            if event in known["outputs"]:
                # Notes in which order the rank has its rows.
                tracer.compare(event, kept.first[event], known["outputs"][event])
        tracer.orders, tracer.layouts = tracer.layouts, {}
        trace.over_parts = kept.values.over_parts()
        values, reference = kept.values, load_values(self.folder)
        trace.padding_counted = padding_counted(values, tracer.padding.values())
        trace.wrong_terms, terms = wrong_terms(values, reference, self.loss)
        trace.wrong_lines, _, trace.without_gradient, trace.numbers = wrong_lines(
            tracer, values, reference, number, terms
        )
        trace.wrong_gradient, trace.extreme = wrong_gradient(tracer, values, reference, number)
        trace.recomputed_apart, trace.overwritten = tuple(values.apart), tuple(values.overwritten)
        trace.carried = carried(values, number)
        trace.left_out, trace.added = left_out(values, reference), added(values, reference)
        trace.groups = {call: tuple(groups) for call, groups in values.groups.items()}
        trace.exchanged, trace.unseen = frozenset(kept.exchanged), values.unseen
        trace.written = values.written
        trace.sent_by_loss, trace.unused = values.sent_by_loss, kept.received.unused
        trace.cleared = {line: frozenset(names) for line, names in kept.cleared.items()}
        trace.sent_from = values.lines_sent()
        return trace

    def _note_gradients(self, lines: Lines, tracer: CodeTracer, known: Mapping[str, Any]) -> None:
        """Note the gradients of the tensor that is asked for, and what they should be."""
        event, lines.subject = lines.event, tracer.subject
        compared = None
        if event in lines.kept.first and event in known["outputs"]:
            compared = tracer.compare(event, lines.kept.first[event], known["outputs"][event])
        if compared is not None:
            tracer.chosen[event] = compared[1]
            lines.gradients = tracer.gradient_pairs(event, lines.kept, known)

    def _save_update(
        self, subject: Subject, found: RankStep, step: int, run: CodeRun, known: Mapping[str, Any]
    ) -> None:
        """Save weights that differ on this rank, in the first steps with such."""
        # Rounding in part of a model may make some differ before the fault does.
        least = NARROW_TOLERANCE if self.record.narrowed else self.tolerance
        wrong = [n for n, one in found.weights.items() if not one.difference <= least]
        if self.traces and len(run.updates) < MOST_UPDATES and wrong:
            path = Path(self.folder) / f"update{self.world.rank}_{step}.pt"
            with contextlib.suppress(Exception):
                file = save_update(path, subject.local, wrong, self.folder, step)
                run.updates[step] = file
                run.options = options_apart(subject.options(), known["options"])

    @contextlib.contextmanager
    def _observing(self, subject: Subject, kept: Events, step: int) -> Iterator[None]:
        """Inside, `kept` records what modules receive and return; with lines in a watched step."""
        with contextlib.ExitStack() as exits:
            if self.request.modules and (self.traces or self.watched is not None):
                exits.enter_context(subject.recorded(kept))
            if step == self.watched and self.through is not None:
                exits.enter_context(self.through)
            elif step == self.watched:
                exits.enter_context(OperatorWatch(kept, keeps_values=True))
                exits.enter_context(listening(kept))
                exits.enter_context(watching_saved(kept))
                parameters = {n: one.parameter for n, one in subject.local.items()}
                exits.enter_context(Cleared(kept, parameters))
            yield

    def _compare_buffers(
        self, subject: Subject, known: Mapping[str, Tensor], run: CodeRun, found: RankStep
    ) -> None:
        """Note in `found` the buffers that are not left out, and how often wrong ones have what
        they were before the step; in `run` those that do not fit.
        """
        leaves_out = self.request.leaves_out
        buffers = {n: b for n, b in subject.buffers().items() if not leaves_out(n)}
        found.buffers = subject.compare_buffers(known, buffers)
        run.not_compared = tuple(
            name
            for name in {**known, **buffers}
            if name not in found.buffers and not leaves_out(name)
        )
        old, self.old_buffers = self.old_buffers, known
        for name, one in found.buffers.items():
            own = local_part(buffers[name].detach()).cpu()
            is_wrong = one.difference > WRONG and name in old
            if is_wrong and own.is_floating_point() and own.shape == old[name].shape:
                more = own - known[name]
                found.buffers_beside_old[name] = agreement(more, old[name], old[name])

    def _open_mesh(self) -> Any:
        degrees = self.grid.degrees
        mesh = init_device_mesh(
            self.world.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
        )
        self.world.set_timeout(self.request.timeout_seconds / 2, "timeout_seconds / 2")
        self.world.name_groups({mesh.get_group(axis).group_name: axis for axis in degrees})
        return mesh

    def _check_flat(self, built: Built) -> None:
        if built.is_flat and any(
            getattr(module, "_use_orig_params", True) is False
            for root in built.roots
            for module in root.modules()
        ):
            raise ConfigError(
                "parallel: FullyShardedDataParallel hides the gradients of single parameters; "
                "give it use_orig_params=True"
            )

    def _check_names(
        self, parameters: Mapping[str, nn.Parameter], start: Mapping[str, Tensor]
    ) -> None:
        """Raises ConfigError, on every rank, if no rank holds a parameter of the reference."""
        names = {name for of_rank in gathered(list(parameters)) for name in of_rank}
        leaves_out = self.request.leaves_out
        own = {name: p for name, p in parameters.items() if not leaves_out(name)}
        check_names(own, start, self.world.rank)
        missing = [
            name for name in start if not names & self._aliases(name) and not leaves_out(name)
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            what = f"the parameter {missing[0]}{more} of the reference, which has {len(start)}"
            layers = {one[0] if (one := NUMBERED.match(name)) else "" for name in missing}
            if missing == [n for n in start if n.startswith(tuple(f"{x}." for x in layers if x))]:
                what = f"{listed(sorted(layers), 4)} of the reference: left out of every stage, "
                what += "and not trained"
            raise ConfigError(
                f"parallel: no rank has {what}; return every module of the rank, or give rename="
            )

    def _aliases(self, name: str) -> set[str]:
        """All names that the reference has for a parameter."""
        return {name, *(other for names in self.record.tied if name in names for other in names)}

    def _subject(self, built: Built, local: LocalParts, mesh: Any) -> Subject:
        # A module that holds every parameter is the whole model.
        start = load(self.folder, 0)["weights"]
        leaves_out = self.request.leaves_out
        has_all = all(local.keys() & self._aliases(name) for name in start if not leaves_out(name))
        return Subject(
            local,
            built.optimizer,
            built.modules,
            [has_all and len(built.modules) == 1] * len(built.modules),
            {axis: mesh.get_group(axis) for axis in self.grid.axes_in_use},
            self.world.device,
            built.name_of,
            is_job=False,
        )

    @torch.no_grad()
    def _copy(self, local: LocalParts, start: Mapping[str, Tensor]) -> None:
        torch.manual_seed(0)
        for name, one in local.items():
            own = local_part(one.parameter)
            own.copy_(one.part_of(start[name]))
            if self.perturbs and own.is_floating_point():
                own.mul_(1 + torch.finfo(own.dtype).eps * (2 * torch.rand_like(own) - 1))

    def _trace(
        self,
        tracer: CodeTracer,
        kept: Events,
        known: Mapping[str, Any],
        found: RankStep,
        step: int,
        part: Any,
        digest: str,
    ) -> RankTrace | None:
        """A detailed recording of the step if any rank's gradients differ."""
        if not self.traces:
            return None
        wrong = [n for n, a in found.gradients.items() if not a.difference <= self.tolerance]
        names = sorted({name for of_rank in gathered(wrong) for name in of_rank})
        trace = tracer.trace(kept, known, names)
        if names:
            names = [name for name in names if name in tracer.subject.local]
            path = Path(self.folder) / f"part{self.world.rank}_{step}.pt"
            with contextlib.suppress(Exception):
                trace.file = save_part(path, tracer, part, digest, names)
        return trace


def _note_wrappers(run: CodeRun, built: Built, local: LocalParts) -> None:
    """Note what DDP and FSDP do in a rank's model."""
    every = [module for root in built.roots for module in root.modules()]
    run.averages = any(map(_averages, every))
    run.is_ddp = any(isinstance(one, DistributedDataParallel) for one in every)
    groups = (g for one in every if isinstance(one, FSDPModule) for g in fsdp_groups(one))
    shards = {id(param.sharded_param) for group in groups for param in group.fsdp_params}
    hooked = [n for n, one in local.items() if getattr(one.parameter, "_backward_hooks", None)]
    run.hooked = tuple(n for n in hooked if id(local[n].parameter) in shards)
    others = [n for n, one in local.items() if id(one.parameter) not in shards]
    run.beside_shards = tuple(others) if shards else ()
    for hook, _ in (hook for one in every for hook in getattr(one, "_comm_hooks", ())):
        run.comm_hook = getattr(hook, "__name__", "a hook"), _by_index(hook)


def _by_index(hook: Any) -> str:
    """The first line of a hook's file that asks a bucket for its index; "" for none."""
    file = getattr(getattr(hook, "__code__", None), "co_filename", "")
    with contextlib.suppress(SyntaxError):
        source = "" if file.startswith(TORCH) else "".join(linecache.getlines(file))
        for node in ast.walk(ast.parse(source)):
            called = node.func if isinstance(node, ast.Call) and not node.args else None
            if isinstance(called, ast.Attribute) and called.attr == "index":
                line = linecache.getline(file, called.lineno).strip()
                return f"{Path(file).name}:{called.lineno} ({line})"
    return ""


def _unsynchronized(built: Built, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """The parameters of FSDP2 modules that do not reduce their gradients now."""
    every = (inner for root in built.roots for inner in root.modules())
    groups = (g for m in every if isinstance(m, FSDPModule) for g in fsdp_groups(m))
    local = {id(p.sharded_param) for g in groups if not g.reduce_grads for p in g.fsdp_params}
    return tuple(name for name, one in parameters.items() if id(one) in local)


def _averages(module: nn.Module) -> bool:
    """Whether it averages gradients over several ranks; FSDP2 of one rank has none to average."""
    if not isinstance(module, FSDPModule):
        return isinstance(module, DistributedDataParallel | FullyShardedDataParallel)
    return any(group.mesh_info.mesh.size() > 1 for group in fsdp_groups(module))
