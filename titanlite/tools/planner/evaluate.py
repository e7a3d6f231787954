"""What one plan of a search takes: its pieces, composed and timed; or why it is dropped. No torch.

    Changes -> legal? -> pieces -> bounds -> memory -> time -> FoundPlan

Each step is tried only if the one before leaves the plan in the search. A plan that fails in
composing or timing is an error of titanlite, and becomes a FailedPlan that names it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.config.checks import run_checks
from titanlite.config.degrees import make_parallel_dims
from titanlite.config.draft import Draft
from titanlite.config.load import override
from titanlite.config.model import resolve_model
from titanlite.config.resolve import finish
from titanlite.errors import ConfigError
from titanlite.tools.planner.bounds import Bounds, Floor, Frontier, TooLarge
from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.compose import compose, peaks
from titanlite.tools.planner.composition import Pieces, TraceError, smaller, uses_fsdp
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.predict import predict
from titanlite.tools.planner.scale import scaled
from titanlite.tools.planner.segments import Row, Shared
from titanlite.tools.planner.space import (
    ASYNC_TP,
    CHANGED,
    GLOBAL_BATCH,
    LOCAL_BATCH,
    MICROBATCH,
    MODE,
    OF_PIECES,
    PP,
    Changes,
    degrees_of,
    without_layouts,
)

MARGIN = 0.08
"""The share of the memory that a plan leaves free, of a device whose accuracy is not known."""
# Of a long pipeline two shorter ones are timed: a step's time is linear in its microbatches.
MOST_MICROBATCHES_PER_STAGE = 4
MOST_PIECES = 16
"""How many pieces an evaluator keeps from one group of plans to the next."""
DOES_NOT_FIT = "does not fit in memory"
HOST_IS_FULL = "does not fit in the host's memory"
NOT_LEGAL = "not legal"
SLOWER = "cannot be among the fastest or on the front of memory, by its lower bounds"
UNTRACEABLE = "cannot be traced"
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class FoundPlan:
    """A plan that fits: its keys, and what it takes."""

    changes: dict[str, Any]
    peak_bytes: int
    seconds: float
    tokens_per_second: float
    """Of one rank."""
    mfu: float | None
    bubble: float
    bound: str
    host_bytes: int = 0
    """Of the host's memory, for one rank; 0 without CPU offload."""
    least_seconds: float = 0.0
    """About what its work takes at least, in microbatches of any size; 0 if that is not known."""


@dataclass(frozen=True)
class FailedPlan:
    """A plan whose evaluation raised an error, and where."""

    changes: dict[str, Any]
    error: str


Result = FoundPlan | FailedPlan | str
"""What a plan takes, or why it is dropped."""


class Evaluator:
    """Evaluates plans of one job on one device; keeps the pieces that it has traced."""

    def __init__(
        self, config: JobConfig, hardware: Hardware, *, is_compiled: bool, use_cache: bool
    ) -> None:
        self._config, self._hardware, self._use_cache = config, hardware, use_cache
        self._model = resolve_model(config).sizes
        self._cost = Cost(
            hardware, is_compiled=is_compiled, head_dim=getattr(self._model, "head_dim", 128)
        )
        self._work = replace(self._cost, hardware=hardware.without_call_costs())
        self._pieces: dict[tuple[Any, ...], Pieces] = {}
        self._shared: dict[int, Shared] = {}
        self._bounds: dict[tuple[int, bool], Bounds] = {}
        self._tables: dict[tuple[Any, ...], list[Row]] = {}

    def evaluate_all(
        self, plans: Iterable[Changes], known: Frontier | None = None, one_of_each_set: bool = False
    ) -> Iterator[Result]:
        """What the plans of a group take, in their order: what takes less memory first.

        What takes more than a plan that does not fit is not tried. With `known`, to which the plans
        are added, those that cannot be of use are dropped by their bounds. With `one_of_each_set`,
        only the first plan of each set of degrees that is legal, and whose pieces can be traced, is
        tried; if it does not fit, another one with asynchronous TP.
        """
        if len(self._pieces) > MOST_PIECES:
            for known_of in (self._pieces, self._shared, self._bounds):
                known_of.clear()
        too_large = TooLarge()
        ended: set[tuple[Any, ...]] = set()
        only_async: set[tuple[Any, ...]] = set()
        for changes in plans:
            degrees = degrees_of(changes)
            of_mode = *degrees, changes.get(MODE)
            is_async = changes.get(ASYNC_TP, self._config.parallelism.enable_async_tensor_parallel)
            if degrees in ended or of_mode in ended or (degrees in only_async and not is_async):
                yield NOT_TRIED
                continue
            row: Result = DOES_NOT_FIT
            if changes not in too_large:
                row = self.evaluate(changes, known=known, in_any_size=one_of_each_set)
            if row == DOES_NOT_FIT:
                too_large.add(changes)
            elif isinstance(row, FoundPlan) and known is not None:
                known.add(without_layouts(changes), row.seconds, row.peak_bytes)
            if one_of_each_set and row == DOES_NOT_FIT and not is_async:
                only_async.add(degrees)
            elif one_of_each_set and row != NOT_LEGAL:
                is_traced = not (isinstance(row, str) and row.startswith(UNTRACEABLE))
                ended.add(degrees if is_traced else of_mode)
            yield row

    def evaluate(
        self,
        changes: Changes,
        *,
        exactly: bool = False,
        known: Frontier | None = None,
        in_any_size: bool = False,
    ) -> Result:
        """What a plan takes, or why it is dropped; `in_any_size`, by the bounds of its work alone.

        Unless `exactly`, long pipelines are extrapolated from shorter ones, and large microbatches
        from smaller ones.
        """
        try:
            return self._evaluate(changes, exactly, known, in_any_size)
        except Exception as error:  # other plans are still of use, and what was found is kept
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return FailedPlan(dict(changes), " ".join(text.split()))

    def _evaluate(
        self, changes: Changes, exactly: bool, known: Frontier | None, in_any_size: bool
    ) -> Result:
        config = _with_values(self._config, changes)
        training = config.training
        total, rest = divmod(training.local_batch_size, changes.get(MICROBATCH, 1))
        if rest:
            return NOT_LEGAL
        counts = [total]
        if changes[PP] > 1 and not exactly and total > MOST_MICROBATCHES_PER_STAGE * changes[PP]:
            counts = [2 * changes[PP], 3 * changes[PP]]
        jobs: list[ResolvedJob] = []
        for count in counts:
            local = count * changes.get(MICROBATCH, 1)
            batch = training.global_batch_size // training.local_batch_size * local
            shorter = {LOCAL_BATCH: local, GLOBAL_BATCH: batch}
            job = self._resolve(config if count == total else _with_values(config, shorter))
            if job is None:
                return NOT_LEGAL
            jobs.append(job)
        try:
            compiled = pieces = self._load(changes, jobs[0], exactly=exactly)
            if exactly and config.compile.enable:
                # Its peak is that of compiled blocks, which take longer to trace.
                compiled = self._load_pieces(jobs[0], is_compiled=True)
        except (TraceError, ConfigError) as error:  # the latter of the reduced job
            return f"{UNTRACEABLE}: {' '.join(str(error).split())}"[:100]
        cost = self._cost.on(jobs[0].dims)
        floor_seconds = 0.0
        if known is not None:
            bounds = self._bounds.setdefault((id(pieces), in_any_size), Bounds(pieces))
            cost_of_floor = self._work.on(jobs[0].dims) if in_any_size else cost
            floor = bounds.floor(jobs[0], cost_of_floor, total)
            if not self._fits(floor.num_bytes):
                return DOES_NOT_FIT
            if known.excludes(floor):
                return SLOWER
            floor_seconds = floor.seconds
        shared = Shared(tables=self._tables)
        if not exactly:
            shared = self._shared.setdefault(id(pieces), shared)
        compositions = [compose(job, pieces, shared=shared, is_quick=not exactly) for job in jobs]
        least, most = map(peaks, (compositions[0], compositions[-1]))
        if compiled is not pieces:
            graphs = [peaks(compose(job, compiled)) for job in (jobs[0], jobs[-1])]
            # As in plan_job, a GPU takes no more than eager code (planning.py).
            if config.job.device == "cuda":
                graphs = [min(pair) for pair in zip(graphs, (least, most), strict=True)]
            least, most = graphs
        # The steps between the two shorter pipelines, and from there to the whole one.
        steps = 0.0 if len(jobs) == 1 else (total - counts[0]) / (counts[1] - counts[0])
        peak, host_peak = (
            round(one + steps * (other - one)) for one, other in zip(least, most, strict=True)
        )
        if not self._fits(peak + self._hardware.memory.beside_bytes):
            return DOES_NOT_FIT
        host = self._hardware.host
        if host is not None and host_peak > host.num_bytes * (1 - MARGIN):
            return HOST_IS_FULL
        if known is not None and known.excludes(Floor(floor_seconds, peak)):
            return SLOWER
        few = predict(jobs[0], compositions[0], cost, pieces, shared, keeps_actions=False)
        more = few
        if len(jobs) > 1:
            more = predict(jobs[1], compositions[1], cost, pieces, shared, keeps_actions=False)
        step = few.step
        seconds = step.seconds + steps * (more.step.seconds - step.seconds)
        # Tokens grow with the microbatches, the idle time does not.
        speed = total / counts[0] * step.seconds / seconds
        return FoundPlan(
            dict(changes),
            peak,
            seconds,
            step.tokens_per_second * speed,
            None if step.mfu is None else step.mfu * speed,
            few.bubble * step.seconds / seconds,
            step.bound,
            host_peak,
            floor_seconds if in_any_size else 0.0,
        )

    def _resolve(self, config: JobConfig) -> ResolvedJob | None:
        """The resolved job; None if it is not legal."""
        draft = Draft(config, make_parallel_dims(config, None), self._model)
        try:
            is_legal = next(run_checks(draft, changed=CHANGED), None) is None
        except ConfigError:
            is_legal = False
        return finish(draft) if is_legal else None

    def _fits(self, num_bytes: float) -> bool:
        known = self._hardware.accuracy
        most = 1 / (1 - MARGIN) if known is None else known.memory[1]
        return num_bytes * most <= self._hardware.memory.num_bytes

    def _load(self, changes: Changes, resolved: ResolvedJob, *, exactly: bool) -> Pieces:
        size = changes[LOCAL_BATCH] if changes[PP] == 1 else changes[MICROBATCH]
        is_scaled = size > 4 and size % 2 == 0 and not exactly
        of_plan = tuple(changes.get(key) for key in OF_PIECES)
        key = of_plan, uses_fsdp(resolved), size, is_scaled
        if key not in self._pieces:
            pieces = None
            if is_scaled:
                # A single sequence takes other paths: some copies are views.
                small = smaller(resolved)
                one, two = (self._of_size(small, key, n) for n in (2, 4))
                pieces = scaled(one, two, size // 2)
            self._pieces[key] = pieces or self._load_pieces(resolved)
        return self._pieces[key]

    def _of_size(self, small: ResolvedJob, key: tuple[Any, ...], size: int) -> Pieces:
        """The pieces of a reduced job with `size` sequences in its microbatch."""
        key = *key[:2], size, False
        if key not in self._pieces:
            batch = small.global_batch_size // small.config.training.local_batch_size * size
            job = override(small.config, {LOCAL_BATCH: size, GLOBAL_BATCH: batch})
            self._pieces[key] = self._load_pieces(resolve_job(job))
        return self._pieces[key]

    def _load_pieces(self, job: ResolvedJob, *, is_compiled: bool = False) -> Pieces:
        software = self._hardware.software
        return load_pieces(job, software, use_cache=self._use_cache, is_compiled=is_compiled)


def _with_values(config: JobConfig, changes: Changes) -> JobConfig:
    """As override, but neither the types of the values nor the job are checked."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    copies = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=copies)
