"""Find the best plan of a job for a number of ranks of some hardware.

    Space -> plans -> pieces, traced once for plans that share them -> memory, time -> SearchResult

Every legal combination of degrees, schedule, microbatch size, activation checkpointing and FSDP's
policy is a candidate. Plans that do not fit in memory are dropped; the others are timed. The search
runs in worker processes; when it is interrupted, what was found so far remains.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.config.load import override
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import divisors
from titanlite.plan.cache import key_of, load_pieces
from titanlite.plan.compose import compose
from titanlite.plan.composition import Pieces, smaller
from titanlite.plan.cost import Cost
from titanlite.plan.hardware import Hardware
from titanlite.plan.predict import predict
from titanlite.plan.scale import scaled
from titanlite.plan.segments import Row, Shared
from titanlite.schedule import SCHEDULES as SCHEDULE_KINDS
from titanlite.schedule import schedule_name

Changes = Mapping[str, Any]
"""Keys of a job ("section.key") and their values in a plan."""

PP, CP, TP = (f"parallelism.{name}_parallel_degree" for name in ("pipeline", "context", "tensor"))
REPLICATE, SHARD = (f"parallelism.data_parallel_{name}_degree" for name in ("replicate", "shard"))
EP = "parallelism.expert_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
RESHARD = "parallelism.fsdp_reshard_after_forward"

MICROBATCH_SIZES = (1, 2, 4, 8)
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
"""Schedules, with their stages per rank."""
CHECKPOINTING: tuple[Changes, ...] = (
    {MODE: "none"},
    {MODE: "selective", OPTION: "op"},
    {MODE: "full"},
)
MARGIN = 0.08
"""The share of the device's memory that a plan leaves free."""
BEST = 10
# Of a long pipeline two shorter ones are timed: a step's time is linear in its microbatches.
MOST_MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Found:
    """A plan that fits: its keys, and what it takes."""

    changes: dict[str, Any]
    peak_bytes: int
    seconds: float
    tokens_per_second: float
    """Of one rank."""
    mfu: float | None
    bubble: float
    bound: str


@dataclass
class SearchResult:
    """What a search has found; `dropped` counts the plans that were not timed, by reason."""

    num_candidates: int = 0
    found: list[Found] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    is_complete: bool = False

    @property
    def best(self) -> list[Found]:
        """The plans with the most tokens per second."""
        return sorted(self.found, key=lambda one: (one.seconds, one.peak_bytes))[:BEST]

    @property
    def front(self) -> list[Found]:
        """The plans that no other beats in both memory and time, from the fastest on."""
        front: list[Found] = []
        for one in sorted(self.found, key=lambda one: (one.seconds, one.peak_bytes)):
            if not front or one.peak_bytes < front[-1].peak_bytes:
                front.append(one)
        return front


# Candidates


@dataclass(frozen=True)
class Space:
    """The plans of a job for `num_ranks`. The keys in `kept` have the value given there."""

    config: JobConfig
    num_ranks: int
    ranks_per_node: int
    num_blocks: int
    kept: Changes
    num_experts: int = 0
    """The experts of a block; 0 for a dense model."""

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Every combination; not all are legal. Tensor parallelism stays within a node.

        The global batch is the job's. What a rank gets of it is split into microbatches.
        """
        global_batch = self.config.training.global_batch_size
        every = divisors(self.num_ranks)
        in_node = [degree for degree in every if degree <= self.ranks_per_node]
        for tp, pp, cp in itertools.product(
            self._of(TP, in_node), self._of(PP, every), self._of(CP, every)
        ):
            dp, rest = divmod(self.num_ranks, tp * pp * cp)
            if rest or not dp or global_batch % dp:
                continue
            of_node = math.gcd(dp, max(1, self.ranks_per_node // (tp * cp)))
            for shards in self._of(SHARD, sorted({dp, of_node, 1}, reverse=True)):
                replicas, rest = divmod(dp, shards)
                if rest or self.kept.get(REPLICATE, replicas) != replicas:
                    continue
                degrees = {PP: pp, REPLICATE: replicas, SHARD: shards, CP: cp, TP: tp}
                for of_experts, checkpointing, rest_of in itertools.product(
                    self._expert_parallel(shards * cp * tp),
                    self._checkpointing(),
                    list(self._batches(pp, global_batch // dp, shards * cp > 1)),
                ):
                    yield degrees | of_experts | dict(checkpointing) | rest_of

    def _of(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return [self.kept[key]] if key in self.kept else values

    def _expert_parallel(self, room: int) -> list[dict[str, Any]]:
        """The EP degrees that divide `room`, the ranks among which EP chooses, and the experts."""
        if not self.num_experts:
            return [{}]
        legal = [ep for ep in divisors(room) if self.num_experts % ep == 0]
        return [{EP: ep} for ep in self._of(EP, legal)]

    def _checkpointing(self) -> Sequence[Changes]:
        return ({},) if {MODE, OPTION} & self.kept.keys() else CHECKPOINTING

    def _batches(self, pp: int, per_rank: int, has_shards: bool) -> Iterator[dict[str, Any]]:
        if pp == 1:
            policies = ("default", "never") if has_shards else ("default",)
            for size in self._of(LOCAL_BATCH, MICROBATCH_SIZES):
                if per_rank % size == 0:
                    for policy in self._of(RESHARD, policies):
                        yield {LOCAL_BATCH: size, RESHARD: policy}
            return
        for size in self._of(MICROBATCH, MICROBATCH_SIZES):
            if per_rank % size:
                continue
            for schedule, chunks in self._schedules():
                per_stage = self._layers_per_stage(schedule, pp, chunks)
                if per_stage != 0:
                    batches = {LOCAL_BATCH: per_rank, MICROBATCH: size}
                    yield batches | {SCHEDULE: schedule, PER_STAGE: per_stage}

    def _schedules(self) -> Sequence[tuple[str, int]]:
        wanted = self.kept.get(SCHEDULE)
        if wanted is None:
            return SCHEDULES
        return [one for one in SCHEDULES if one[0] == wanted] or [(wanted, 1), (wanted, 2)]

    def _layers_per_stage(self, schedule: str, pp: int, chunks: int) -> int | None:
        """The value that gives each rank `chunks` stages: None by default, 0 if there is none."""
        if PER_STAGE in self.kept:
            return int(self.kept[PER_STAGE])
        if chunks == SCHEDULE_KINDS[schedule_name(schedule)].min_chunks:
            return None
        parallelism = self.config.parallelism
        weight = (
            self.num_blocks
            + parallelism.pipeline_parallel_first_stage_less_layers
            + parallelism.pipeline_parallel_last_stage_less_layers
        )
        per_stage = -(-weight // (pp * chunks))
        return per_stage if -(-weight // per_stage) == pp * chunks else 0


def groups(plans: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The plans by what their pieces depend on, beside the size of a microbatch."""
    found: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for plan in plans:
        is_sharded = plan[SHARD] * plan[CP] > 1 or plan[PP] > 1
        found[plan[TP], plan[CP], plan.get(EP), plan.get(MODE), is_sharded].append(plan)
    # Few plans first would leave one worker with the largest group at the end.
    return sorted(found.values(), key=len, reverse=True)


# Evaluation


class Evaluator:
    """Evaluates plans of one job on one device; keeps the pieces that it has traced."""

    def __init__(
        self, config: JobConfig, hardware: Hardware, *, is_compiled: bool, use_cache: bool
    ) -> None:
        self._config, self._hardware, self._use_cache = config, hardware, use_cache
        self._cost = Cost(hardware, is_compiled=is_compiled)
        self._pieces: dict[tuple[str, bool], Pieces] = {}
        self._shared: dict[int, Shared] = {}
        self._tables: dict[tuple[Any, ...], list[Row]] = {}

    def forget(self) -> None:
        """Forget the pieces, and what plans share that have them."""
        self._pieces.clear()
        self._shared.clear()

    def evaluate_all(self, plans: Iterable[Changes]) -> list[Found | str]:
        """What the plans of a group take, in their order: smaller microbatches first.

        If a plan does not fit in memory, neither does it with larger microbatches.
        """
        self.forget()
        too_large: set[frozenset[tuple[str, Any]]] = set()
        rows: list[Found | str] = []
        for changes in plans:
            size = LOCAL_BATCH if changes[PP] == 1 else MICROBATCH
            others = frozenset(item for item in changes.items() if item[0] != size)
            row = DOES_NOT_FIT if others in too_large else self.evaluate(changes)
            if row == DOES_NOT_FIT:
                too_large.add(others)
            rows.append(row)
        return rows

    def evaluate(self, changes: Changes, *, exactly: bool = False) -> Found | str:
        """What a plan takes, or why it is dropped.

        Unless `exactly`, long pipelines are extrapolated from shorter ones, and large microbatches
        from smaller ones.
        """
        try:
            config = override(self._config, changes)
            pp, size = changes[PP], changes.get(MICROBATCH, 1)
            total = config.training.local_batch_size // size
            if pp == 1 or exactly or total <= MOST_MICROBATCHES_PER_STAGE * pp:
                return self._found(changes, resolve_job(config), exactly=exactly)
            counts = 2 * pp, 3 * pp
            few, more = (
                self._found(changes, resolve_job(self._shorter(config, count)), exactly=False)
                for count in counts
            )
        except ConfigError:
            return "not legal"
        except Exception as error:  # one plan that cannot be traced must not end the search
            return f"cannot be traced: {type(error).__name__}: {error}"[:100]
        if isinstance(few, str) or isinstance(more, str):
            return few if isinstance(few, str) else str(more)
        steps = (total - counts[0]) / (counts[1] - counts[0])
        return self._extrapolated(few, more, steps, total / counts[0])

    def _shorter(self, config: JobConfig, num_microbatches: int) -> JobConfig:
        """The job with that many microbatches."""
        local = num_microbatches * config.parallelism.pipeline_parallel_microbatch_size
        dp = config.training.global_batch_size // config.training.local_batch_size
        return override(config, {LOCAL_BATCH: local, GLOBAL_BATCH: local * dp})

    def _extrapolated(self, few: Found, more: Found, steps: float, ratio: float) -> Found | str:
        peak = round(few.peak_bytes + steps * (more.peak_bytes - few.peak_bytes))
        if not self._fits(peak):
            return DOES_NOT_FIT
        seconds = few.seconds + steps * (more.seconds - few.seconds)
        # Tokens grow with the microbatches, the idle time does not.
        speed = ratio * few.seconds / seconds
        return replace(
            few,
            peak_bytes=peak,
            seconds=seconds,
            tokens_per_second=few.tokens_per_second * speed,
            mfu=None if few.mfu is None else few.mfu * speed,
            bubble=few.bubble * few.seconds / seconds,
        )

    def _fits(self, num_bytes: int) -> bool:
        return num_bytes <= self._hardware.memory.num_bytes * (1 - MARGIN)

    def _found(self, changes: Changes, resolved: ResolvedJob, *, exactly: bool) -> Found | str:
        pieces = self._load(resolved, exactly=exactly)
        shared = Shared() if exactly else self._shared_by(pieces)
        compositions = compose(resolved, pieces, shared=shared, is_quick=not exactly)
        peak = max(one.peak().num_bytes for one in compositions)
        if not self._fits(peak):
            return DOES_NOT_FIT
        cost = self._cost.on(resolved.dims)
        of = predict(resolved, compositions, cost, pieces, shared, keeps_actions=False)
        step = of.step
        return Found(
            dict(changes),
            peak,
            step.seconds,
            step.tokens_per_second,
            step.mfu,
            of.bubble,
            step.bound,
        )

    def _shared_by(self, pieces: Pieces) -> Shared:
        return self._shared.setdefault(id(pieces), Shared(tables=self._tables))

    def _load(self, resolved: ResolvedJob, *, exactly: bool) -> Pieces:
        small = smaller(resolved)
        size = small.config.training.local_batch_size
        is_scaled = size > 4 and size % 2 == 0 and not exactly
        key = key_of(small), is_scaled
        if key not in self._pieces:
            pieces = None
            if is_scaled:
                # A single sequence takes other paths: some copies are views.
                one, two = (self._load(_of_size(small, n), exactly=True) for n in (2, 4))
                pieces = scaled(one, two, size // 2)
            self._pieces[key] = pieces or load_pieces(small, use_cache=self._use_cache)
        return self._pieces[key]


ENOUGH_SLOWER = 2
MORE_CP = "more context parallelism, which was slower"
DOES_NOT_FIT = "does not fit in memory"


def _of_size(small: ResolvedJob, size: int) -> ResolvedJob:
    """A reduced job with `size` sequences in its microbatch."""
    batch = small.global_batch_size // small.config.training.local_batch_size * size
    return resolve_job(override(small.config, {LOCAL_BATCH: size, GLOBAL_BATCH: batch}))


# The search


def search(
    space: Space,
    hardware: Hardware,
    *,
    is_compiled: bool = False,
    use_cache: bool = True,
    num_workers: int = 1,
    exhaustive: bool = False,
    on_progress: Callable[[SearchResult, int], None] = lambda *_: None,
) -> SearchResult:
    """Evaluate all plans of `space`; the best ones are evaluated once more, exactly.

    Plans are taken by their context-parallel degree. Once the best of two degrees in turn is slower
    than the best before, larger degrees are dropped, unless `exhaustive`.
    `on_progress(result, done)` is called as plans are done. An interrupt ends the search with what
    it has found.
    """
    plans = list(space.candidates())
    result = SearchResult(len(plans))
    settings = space.config, hardware, is_compiled, use_cache
    done = 0
    # A forked worker would inherit locks of threads.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start, settings)
    try:
        with pool:
            try:
                slower = 0
                for cp, of_cp in _by_cp(plans):
                    if slower == ENOUGH_SLOWER and not exhaustive:
                        result.dropped[MORE_CP] += len(of_cp)
                        done += len(of_cp)
                        continue
                    fastest = min((one.seconds for one in result.found), default=math.inf)
                    futures = {pool.submit(_evaluate, group): group for group in groups(of_cp)}
                    for future in as_completed(futures):
                        done += len(futures[future])
                        _take(result, future.result())
                        on_progress(result, done)
                    own = min((o.seconds for o in result.found if o.changes[CP] == cp), default=0.0)
                    slower = slower + 1 if own > fastest else 0
                # Among the best, none is extrapolated at the end.
                exact: set[int] = set()
                while left := [one for one in result.best if id(one) not in exact]:
                    result.found = [one for one in result.found if one not in left]
                    before = len(result.found)
                    _take(result, pool.map(_evaluate_exactly, [one.changes for one in left]))
                    exact |= {id(one) for one in result.found[before:]}
                result.is_complete = True
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
    except KeyboardInterrupt:
        pass
    return result


def _by_cp(plans: Sequence[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for plan in plans:
        found[plan[CP]].append(plan)
    return sorted(found.items())


def _take(result: SearchResult, rows: Iterable[Found | str]) -> None:
    for row in rows:
        if isinstance(row, str):
            result.dropped[row] += 1
        else:
            result.found.append(row)


_evaluator: Evaluator | None = None


def _start(config: JobConfig, hardware: Hardware, is_compiled: bool, use_cache: bool) -> None:
    """Prepare a worker. Ctrl-C reaches it too, and is the parent's to handle."""
    import signal

    global _evaluator
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _evaluator = Evaluator(config, hardware, is_compiled=is_compiled, use_cache=use_cache)


def _evaluate(plans: list[dict[str, Any]]) -> list[Found | str]:
    assert _evaluator is not None
    return _evaluator.evaluate_all(plans)


def _evaluate_exactly(plan: dict[str, Any]) -> Found | str:
    assert _evaluator is not None
    return _evaluator.evaluate(plan, exactly=True)
