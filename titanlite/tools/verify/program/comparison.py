"""Compares parallel code with a plain model on one process: `titanlite.compare`.

result = titanlite.compare(build_model, build_parallel, batches=batches, loss=loss, ranks=4)
assert result.agrees, result
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.dataflow import describe_event
from titanlite.tools.verify.differences import (
    Key,
    Tolerance,
    differences,
    largest_of,
    unequal_replicas,
)
from titanlite.tools.verify.evidence import WRONG
from titanlite.tools.verify.job_runs import failure
from titanlite.tools.verify.pool import RankPools, must_run
from titanlite.tools.verify.program.findings import PartEvidence, are_local, conclude
from titanlite.tools.verify.program.grid import make_grid
from titanlite.tools.verify.program.request import Request, Split, check, pack
from titanlite.tools.verify.record import CodeRun, ModelRun, PartFits, RankRun, Update
from titanlite.tools.verify.report import format_result
from titanlite.tools.verify.result import Result
from titanlite.tools.verify.sensitivity import (
    HALF_SPACING,
    NUM_PERTURBED,
    SENSITIVITY,
    Given,
    Sensitivity,
)
from titanlite.tools.verify.wording import be, listed, name_parameters

if TYPE_CHECKING:
    from titanlite.ranks.world import World

# The arguments of `compare` that are not those of `Comparer.compare`, or not by name.
OF_THE_RANKS = ("timeout_seconds", "max_ranks", "threads")
POSITIONAL = ("reference", "parallel")
FLOAT32_ROUNDING = 2.0**-23
# A reference that differs from itself by more than this draws random numbers.
RANDOM = 1e-3


@dataclass
class Comparison(Result):
    """The result of comparing parallel code with its reference; `print` shows all of it."""

    grid: Grid
    dtype: str
    num_steps: int
    name: str = ""
    """The name of the function that builds the parallel model."""
    losses: str = ""
    """How the ranks' losses were combined: "mean" or "sum" over the parts of the batch; "" if each
    rank's loss was compared by itself."""

    def __str__(self) -> str:
        """The parallel code and its reference, the table of differences, and the diagnosis."""
        steps = f"{self.num_steps} step{'s' * (self.num_steps > 1)}"
        ranks = f"{self.grid.world_size} rank{'s' * (self.grid.world_size > 1)}"
        ranks += " as threads" * self.threads
        lines = [
            f"parallel   {self.name}: {self.grid.describe()}, {ranks}",
            f"reference  the same batches on one process; {self.dtype}, {steps}",
        ]
        if self.losses:
            lines.append(f"loss       the {self.losses} over the parts of the batch")
        lines += ["", format_result(self, self.dtype)]
        if self.error is not None:
            lines += ["", self.error.rank_traceback]
        return "\n".join(lines).rstrip()

    @property
    def error_finding(self) -> str:
        return f"the parallel code does not run: {self.error}"

    def check(self) -> Comparison:
        """Raises AssertionError, with what `print` shows, unless the parallel code agrees."""
        if not self.agrees:
            raise AssertionError(f"\n{self}")
        return self


def compare(
    reference: Callable[[], Any],
    parallel: Callable[..., Any],
    *,
    batches: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    ranks: int | Mapping[str, int],
    split: Split | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[Any]], Any] | None = None,
    clip: Callable[[Any], Any] | None = None,
    shard: Callable[[str], Any] | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    copy_weights: bool = False,
    leave_out: Sequence[str] = (),
    parallel_loss: Callable[[Any, Any], Any] | None = None,
    microbatches: int | None = None,
    modules: bool = True,
    dtype: str = "float64",
    tolerance: float | str | None = None,
    seed: int | None = 0,
    timeout_seconds: float = 300,
    max_ranks: int | None = None,
    threads: bool | None = None,
) -> Comparison:
    """Train parallel code on local ranks and its plain model on one process, and compare each step.

    `reference()` returns the plain model. `parallel()` or `parallel(mesh)` runs on every rank, in
    an initialized process group (gloo on CPU), and returns that rank's model, or a tuple whose
    elements are modules (such as pipeline stages), an optimizer, and anything else that `step`
    needs. `ranks` is the number of ranks, or a dict from axis to degree; ranks are numbered in
    row-major order. `mesh` is a DeviceMesh with the axes of that dict; if `ranks` is a number, its
    only axis is "world".

    batches: the global batch of each step: tensors in dicts, tuples or lists.
    loss: a function (model, batch) that returns a scalar tensor. It is called on the reference and,
        if neither `step` nor `parallel_loss` is given, on the ranks.
    parallel_loss: the same for the ranks alone, such as a loss of vocabulary shards.
    split: how a rank gets its part of a batch. With None, all ranks get the whole batch. With the
        name of an axis, dimension 0 of every tensor is cut into equal parts over this axis. A dict
        from axis to dimension cuts other dimensions. A function (batch, mesh) returns the part, of
        plain tensors or DTensors.
    step: a function (built, part), where `built` is what `parallel` returned. It runs the forward
        and backward passes of a rank itself, and returns the loss or None.
    microbatches: how many forward passes `step` makes with gradients, each with an equal part of
        the rank's rows; by default, as many as are seen.
    optimizer: a function (parameters) that returns the optimizer of either side; by default AdamW
        with lr 1e-3.
    clip: a function (model) that clips the gradients and returns their norm; it is called on both
        sides before each optimizer step.
    shard: a function (name) that says how a rank's tensor of this name is cut from the reference's.
        It returns one of: None, if the tensor is not cut; (dim, axis), if dimension `dim` is cut
        into equal chunks over the mesh axis `axis`; (dim, index, count), if the rank has chunk
        `index` of `count` along `dim`; a list of such tuples, for several cuts; or a function from
        the whole tensor to the rank's part. DTensors do not need it. Other tensors do not need it
        if one dimension is 1/n of the reference's and only one axis has degree n.
    rename: a function or a dict from the parallel code's name of a parameter or module to that of
        the reference. Prefixes of DDP, FSDP1, torch.compile and checkpoint wrappers are removed
        before.
    copy_weights: start from the reference's weights instead of comparing the starting values.
    leave_out: names or patterns ("*.counts") of the reference's parameters, buffers and modules
        that are not compared.
    modules: whether to record what modules receive and return, by forward hooks.
    dtype: "float64", "float32" or "bfloat16", torch's default dtype while the functions run.
    tolerance: the largest relative difference that counts as agreement, or "sensitivity": as much
        as rounding moves the reference, for dtypes that round coarsely. docs/compare.md explains
        both and the default.
    seed: torch.manual_seed gets it before `reference` and before `parallel` is called; None for no
        seed.
    timeout_seconds: how long the ranks may take altogether.
    max_ranks: the largest number of ranks to start; by default as many as the cores and the
        memory of this machine allow.
    threads: whether the ranks are threads of this process, of which one runs at a time: up to
        4,096, without a timeout, and a breakpoint stops all of them; what the functions change in
        the process stays changed. By default they are if there are too many for processes.

    Raises ConfigError for a mistake in the arguments and TitanliteError if the reference does not
    run. An exception on a rank is part of the result.
    """
    options = {name: value for name, value in locals().items() if name not in POSITIONAL}
    ranks_of = {name: options.pop(name) for name in OF_THE_RANKS}
    with Comparer(**ranks_of) as comparer:
        return comparer.compare(reference, parallel, **options)


def assert_equivalent(
    reference: Callable[[], Any], parallel: Callable[..., Any], **options: Any
) -> Comparison:
    """Call `compare` with these arguments, and return its result.

    Raises AssertionError, with the likely cause, unless the parallel code agrees.
    """
    return compare(reference, parallel, **options).check()


class Comparer:
    """A context manager: all comparisons in its `with` block run on the same processes.

    That is faster than new processes for each. Global state that the caller's code changes stays
    changed for the next comparison. With `threads`, the ranks are threads of this process.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
        threads: bool | None = None,
    ) -> None:
        self._pools = RankPools(
            timeout_seconds=timeout_seconds, max_ranks=max_ranks, threads=threads
        )

    def __enter__(self) -> Comparer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pools.__exit__(*error)

    def compare(
        self,
        reference: Callable[[], Any],
        parallel: Callable[..., Any],
        *,
        ranks: int | Mapping[str, int],
        tolerance: float | str | None = None,
        **options: Any,
    ) -> Comparison:
        """The same as `titanlite.compare`."""
        start = time.perf_counter()
        grid = make_grid(ranks)
        request = Request(
            reference, parallel, grid=grid, timeout_seconds=self._pools.timeout_seconds, **options
        )
        check(request)
        packed = pack(request)
        name = getattr(getattr(parallel, "func", parallel), "__name__", type(parallel).__name__)
        found = Comparison(grid, request.dtype, len(request.batches), name)
        # The ranks start while the reference runs.
        pool = self._pools.of(grid.world_size)
        found.threads = pool.are_threads
        pool.start()
        with tempfile.TemporaryDirectory(prefix="titanlite-compare-") as folder:
            record = self._reference(packed, folder)
            found.narrowed = record.narrowed

            def on_rank(world: World) -> CodeRun:
                from titanlite.tools.verify.program.parallel import run_parallel

                return run_parallel(world, packed, folder, record)

            try:
                runs = pool.call(on_rank)
            except TitanliteError as error:
                found.error = failure(error)
                found.findings = [found.error_finding]
            else:
                judging = _Judging(self._pools, request, packed, folder, record, runs, found)
                judging.judge(tolerance)
        found.seconds = time.perf_counter() - start
        return found

    def _reference(self, packed: bytes, folder: str) -> ModelRun:
        def on_rank(world: World) -> ModelRun:
            from titanlite.tools.verify.program.reference import run_model

            return run_model(world, packed, folder)

        with must_run("reference: does not run"):
            record = self._pools.alone(on_rank)
        for step, numbers in enumerate(record.steps):
            if not math.isfinite(numbers.loss + numbers.norm):
                raise ConfigError(
                    f"reference: its loss or gradient norm is not finite in step {step}, so it "
                    "cannot be compared; give other batches or another optimizer"
                )
        return record


@dataclass
class _Judging:
    """Combines the ranks' measurements into a result."""

    pools: RankPools
    request: Request
    packed: bytes
    folder: str
    record: ModelRun
    runs: list[CodeRun]
    found: Comparison

    def judge(self, tolerance: float | str | None) -> None:
        """Fill in the result."""
        found, is_narrow = self.found, bool(self.record.narrowed)
        self._place()
        found.losses = self._combine_losses()
        is_measured = tolerance == SENSITIVITY
        found.differences = self._differences(self.runs, by_distance=is_measured)
        if is_measured:
            again = (self._again(found.dtype, number) for number in range(1, NUM_PERTURBED + 1))
            rounding = largest_of(again, len(self.record.steps))
            least = HALF_SPACING[found.dtype]
            found.judge(Sensitivity(found.dtype, rounding, is_narrow, least=least))
        elif isinstance(tolerance, float):
            found.judge(Given(dtype=found.dtype, limit=tolerance))
        elif found.dtype == "float64":
            found.judge(Tolerance("float64", is_narrow=is_narrow))
        else:
            found.judge(Tolerance(found.dtype, self._rounding(found.dtype, "float64")))
        is_wrong = any(failure.kind != "start" for failure in found.failures)
        if is_wrong and found.dtype == "float64":
            # Some tensors have larger rounding errors; measuring them also finds random numbers.
            rounding = self._rounding("float64")
            if tolerance is None:
                found.judge(Tolerance("float64", rounding, is_narrow))
        self._judge_pending()
        names = {name for run in self.runs for name in run.placements}
        found.splits = [split for split in unequal_replicas(self.runs) if split.name in names]
        self._judge_local()
        found.look_at_traffic(self.runs)
        if not found.agrees:
            found.findings = list(found.problems)
            is_explained = found.problems and all(
                failure.kind in ("weight", "state") or failure.step > found.failures[0].step
                for failure in found.failures
            )
            if (found.failures or found.splits) and not is_explained:
                found.findings += conclude(self._evidence())
        self._note_not_compared()

    def _judge_pending(self) -> None:
        """Judge gradients that are Partial at the optimizer step by the weights that follow.

        If these agree, the optimizer has reduced the gradients itself.
        """
        found = self.found
        names = {name for run in self.runs for name in run.pending}
        after = {
            f.name.rpartition(".")[0] if f.kind == "state" else f.name
            for f in found.failures
            if f.kind in ("start", "weight", "state")
        }
        reduced = names - after if after <= names else set()
        if reduced:
            who = name_parameters(reduced, self.runs, "gradient")
            found.notes.append(
                f"{who} {be(who)} still Partial at the optimizer step, but the weights and the "
                "optimizer state agree after it: the optimizer reduces them itself"
            )
            self._leave_to_the_step(reduced)
        first = found.failures[0].step if found.failures else 0
        wrong = {f.name for f in found.failures if f.kind == "gradient" and f.step == first}
        if names := names - reduced - wrong:
            who = name_parameters(names, self.runs, "gradient")
            found.problems.append(
                f"{who} {be(who)} still Partial at the optimizer step, though the local part is "
                "correct: an optimizer that reduces it would get a wrong gradient. Give it the "
                "placements of its parameter before the optimizer step"
            )

    def _judge_local(self) -> None:
        """Judge gradients of each rank's own part by the weights, which agree after every step."""
        found = self.found
        kinds = {failure.kind for failure in found.failures}
        names = {failure.name for failure in found.failures}
        if kinds == {"gradient"} and all(map(self._is_only_missing, names)):
            self._leave_to_the_step(names)
            found.notes.append(
                "some ranks lack gradients at the optimizer step, but the weights agree after "
                "every step on all of them: the step gives them what they lack"
            )
        elif kinds == {"gradient"} and not found.splits and are_local(self._evidence()):
            self._leave_to_the_step({failure.name for failure in found.failures})
            found.notes.append(
                "the gradients are each rank's own at the optimizer step, but the weights agree "
                "after every step: the optimizer's step reduces them itself"
            )

    def _is_only_missing(self, name: str) -> bool:
        """Whether a gradient is right on every rank that has one."""
        parts = [part for run in self.runs for s in run.steps if (part := s.gradients.get(name))]
        right = [part for part in parts if part.digest and part.difference <= WRONG]
        return bool(right) and all(part in right or not part.digest for part in parts)

    def _leave_to_the_step(self, names: set[str]) -> None:
        """Judge these gradients no longer, since the step itself completes them."""
        for of_step in self.found.differences:
            for name in names:
                of_step.pop(("gradient", name), None)
        self.found.judge(self.found.tolerance)

    def _note_not_compared(self) -> None:
        """Note what was left out, or has a layout or a shape that fits nothing."""
        found, request = self.found, self.request
        compared = {name for run in self.runs for step in run.steps for name in step.buffers}
        buffers = {
            f"the buffer {name}"
            for run in self.runs
            for name in run.not_compared
            if name not in compared
        }
        outputs: set[str] = set()
        if not found.agrees:
            step = found.failures[0].step if found.failures else 1
            traces = [run.traces[step] for run in self.runs if step in run.traces]
            compared = {event for trace in traces for event in trace.events}
            outputs = {
                describe_event(event)
                for trace in traces
                for event in trace.not_compared
                if event not in compared
            }
        left = [f"what leave_out names ({listed(request.leave_out, 3)})"] * bool(request.leave_out)
        if names := [*left, *sorted(buffers), *sorted(outputs)]:
            found.notes.append(f"not compared: {listed(names, 6)}")

    def _place(self) -> None:
        """Find along which axes each parameter is replicated: where ranks hold equal elements."""
        grid, runs = self.found.grid, self.runs
        names = {name for run in runs for name in run.places}
        axes = [axis for axis in grid.axes_in_use if self._is_held_along(axis, names)]
        for run in runs:
            for name in run.places:
                run.placements[name] = {
                    axis: "replicated"
                    if len({runs[r].places.get(name) for r in self._along(axis, run)}) == 1
                    else "sharded"
                    for axis in axes
                }

    def _is_held_along(self, axis: str, names: set[str]) -> bool:
        """Whether all ranks along an axis hold the same parameters: not so for pipeline stages."""
        return all(
            len({name in self.runs[rank].places for rank in self._along(axis, run)}) == 1
            for run in self.runs
            for name in names
        )

    def _along(self, axis: str, run: CodeRun) -> list[int]:
        """The ranks that differ from this one only on one axis."""
        place = self.found.grid.coordinates(run.rank)
        return [
            other.rank
            for other in self.runs
            if {**self.found.grid.coordinates(other.rank), axis: 0} == {**place, axis: 0}
        ]

    def _combine_losses(self) -> str:
        """Set each run's loss to what is compared with the reference's; returns how it was made.

        The losses of the distinct parts of the batch are averaged or added, whichever is closer to
        the reference's loss over all steps.
        """
        ways: dict[str, list[list[float]]] = {"": [], "mean": [], "sum": []}
        for step, known in enumerate(self.record.steps[1:]):
            own = [run.losses[step] for run in self.runs]
            given = [value for value in own if value is not None]
            by_part: dict[str, float] = {}
            for run, value in zip(self.runs, own, strict=True):
                if value is not None:
                    by_part.setdefault(run.parts[step], value)
            parts = list(by_part.values())
            if not given:
                given, parts = [known.loss], [known.loss]
            ways[""].append([given[0] if value is None else value for value in own])
            ways["mean"].append([fmean(parts)] * len(own))
            ways["sum"].append([math.fsum(parts)] * len(own))
        is_split = any(len(set(of_step)) > 1 for of_step in self._parts_by_step())
        chosen = min(ways, key=lambda way: self._loss_error(ways[way])) if is_split else ""
        for step, values in enumerate(ways[chosen], 1):
            for run, value in zip(self.runs, values, strict=True):
                run.steps[step].loss = value
        return chosen

    def _parts_by_step(self) -> list[list[str]]:
        return [[run.parts[step] for run in self.runs] for step in range(self.found.num_steps)]

    def _loss_error(self, values: list[list[float]]) -> float:
        return max(
            max(abs(value - known.loss) for value in of_step)
            for of_step, known in zip(values, self.record.steps[1:], strict=True)
        )

    def _differences(
        self, runs: Sequence[RankRun], *, by_distance: bool = False
    ) -> list[dict[Key, float]]:
        found = differences(runs, self.record.steps, by_distance=by_distance)
        for of_step in found:
            of_step.pop(("lr", ""), None)
            if self.request.clip is None:
                of_step.pop(("norm", ""), None)
        return found

    def _rounding(self, *dtypes: str) -> list[dict[Key, float]]:
        """The reference's differences from itself, with weights that differ in the last bit.

        Raises ConfigError if they are far larger than rounding error.
        """
        found = [self._again(self.found.dtype)]
        for dtype in dtypes:
            if dtype != self.found.dtype:
                try:
                    found.append(self._again(dtype))
                except TitanliteError as error:
                    failure(error)
                    why = " ".join(str(error).split())
                    # One run may agree by chance.
                    least = [dict.fromkeys(of_step, FLOAT32_ROUNDING) for of_step in found[0]]
                    found.append(least)
                    self.found.notes.append(
                        f"the reference does not run in {dtype}, so its rounding error is measured "
                        f"in {self.found.dtype} alone ({why[:200]})"
                    )
        return largest_of(found, len(self.record.steps))

    def _again(self, dtype: str, perturbed: int = 0) -> list[dict[Key, float]]:
        packed, folder, record = self.packed, self.folder, self.record

        def on_rank(world: World) -> CodeRun:
            from titanlite.tools.verify.program.parallel import run_again

            return run_again(world, packed, folder, record, dtype, perturbed)

        again = self.pools.alone(on_rank)
        for step, value in enumerate(again.losses, 1):
            # The loss function of one process always returns a loss.
            again.steps[step].loss = value or 0.0
        found = self._differences([again], by_distance=perturbed > 0)
        # In one step two draws may have nearly the same loss.
        loss = max(of_step.get(("loss", ""), 0.0) for of_step in found[1:3])
        if loss > RANDOM and not perturbed:
            raise ConfigError(
                f"reference: a second run has another loss, by {loss:.0e}: it draws "
                "random numbers, or keeps state outside the model that the function returns; turn "
                "off dropout (p=0, or model.eval() in the function), and build all state there"
            )
        return found

    def _evidence(self) -> PartEvidence:
        found, record = self.found, self.record
        evidence = PartEvidence(found.grid, record.steps, self.runs, found, tied=record.tied)
        step = max(1, evidence.step)
        traces = [run.traces[step] for run in self.runs if step in run.traces]
        evidence.reference_trace, evidence.traces = record.trace, traces
        evidence.changed = record.changed.get(step, ())
        evidence.accumulated = record.accumulated.get(step, {})
        evidence.is_split = len(set(self._parts_by_step()[step - 1])) > 1
        evidence.num_microbatches = self.request.microbatches or max(
            (one.num_calls for trace in traces for one in trace.modules.values()), default=1
        )
        evidence.first_microbatches = max(
            (
                one.num_calls
                for run in self.runs
                if 1 in run.traces
                for one in run.traces[1].modules.values()
            ),
            default=1,
        )
        by_part: dict[str, list[int]] = {}
        for run in self.runs:
            by_part.setdefault(run.parts[step - 1], []).append(run.rank)
        files = [trace.file for trace in traces]
        wrong, most = evidence.failed("gradient"), -1
        # A fit of each microbatch has more unknowns, and may be impossible.
        for count in {1: None, evidence.num_microbatches: None}:
            if not (all(files) and wrong) or 2 * most > len(wrong):
                continue
            parts = self._find_shares(step, files, count)
            number = 0 if parts is None else sum(map(parts.explains, wrong))
            if parts is not None and number > most:
                most, evidence.shares, evidence.rows = number, parts.fits, parts.rows
                evidence.previous = parts.previous
                evidence.weights, evidence.counts = parts.weights, parts.counts
                evidence.parts = [
                    (ranks, index if count > 1 else None)
                    for ranks in by_part.values()
                    for index in range(count)
                ]
        if any(map(evidence.failed, ("loss", "gradient"))) and traces:
            self._watch(evidence, step)
        if evidence.failed("weight"):
            self._judge_updates(evidence, step)
        return evidence

    def _judge_updates(self, evidence: PartEvidence, step: int) -> None:
        packed = self.packed
        files = {run.rank: run.updates[step] for run in self.runs if step in run.updates}

        def on_rank(world: World) -> list[dict[str, Update]]:
            from titanlite.tools.verify.program.weights import judge_updates

            return judge_updates(world, packed, step, list(files.values()))

        with contextlib.suppress(RankError):
            evidence.updates = dict(zip(files, self.pools.alone(on_rank), strict=True))

    def _find_shares(self, step: int, files: Sequence[str], count: int) -> PartFits | None:
        packed, folder = self.packed, self.folder

        def on_rank(world: World) -> PartFits:
            from titanlite.tools.verify.program.reference import find_shares

            return find_shares(world, packed, folder, step, files, count)

        with contextlib.suppress(RankError):
            return self.pools.alone(on_rank)
        return None

    def _watch(self, evidence: PartEvidence, step: int) -> None:
        """Run both sides again, and note the lines of the caller's code."""
        packed, folder, record = self.packed, self.folder, self.record

        def on_one(world: World) -> ModelRun:
            from titanlite.tools.verify.program.reference import run_model

            return run_model(world, packed, folder, step)

        def on_rank(world: World) -> CodeRun:
            from titanlite.tools.verify.program.parallel import run_parallel

            return run_parallel(world, packed, folder, record, step)

        with contextlib.suppress(TitanliteError):
            self.pools.alone(on_one)
            runs = self.pools.of(self.found.grid.world_size).call(on_rank)
            evidence.watched = [run.traces[step] for run in runs]
