"""What to change next in a job: at most three changes of it, each planned.

    JobPlan -> the changes that its figures suggest -> a plan of each -> Advice

A job that does not fit gets changes with which it does, another one changes with which its step is
clearly shorter. Each is composed from pieces. Those of another recomputation, batch or degree of tp
have to be traced, so there are at most MOST_TRACED of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from titanlite.config import ResolvedJob, resolve_job
from titanlite.config.load import override
from titanlite.config.pipeline import split_points
from titanlite.config.toml import show
from titanlite.errors import ConfigError
from titanlite.parallelize.float8.spec import FLOAT8, SECTION
from titanlite.quantities import format_bytes
from titanlite.tools.planner import space
from titanlite.tools.planner.composition import TraceError, offloads, uses_fsdp
from titanlite.tools.planner.cost import MEMORY_BOUND, PRODUCT
from titanlite.tools.planner.evaluate import MARGIN
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.planning import LOW, PIECES, Advice, JobPlan, plan_job
from titanlite.tools.planner.space import Changes
from titanlite.tools.simulate.quantity import format_seconds

MOST = 3
MOST_TRACED = 5
LEAST_GAIN, LEAST_GAIN_OF_KERNELS = 0.05, 0.1
"""The share of the step that a change saves at least; kernels are planned less exactly."""
LEAST_SHARE = 0.03
"""What takes less of the step is no reason for a change."""
LEAST_IDLE = 0.08
SPARE = 1.03
MOST_INTERVAL = 20
FULL = {space.MODE: "full"}
# From the fastest to the one that keeps least.
RECOMPUTATIONS: tuple[Changes, ...] = (
    {space.MODE: "none"},
    {space.MODE: "selective", space.OPTION: "op"},
    {space.MODE: "selective", space.OPTION: "2"},
    FULL,
)
SPLIT = "ZBVZeroBubble"
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), (SPLIT, 2))
"""Schedules, with their stages per rank."""
OTHER_NUMBERS = ("dtype", "float8")
BFLOAT16 = "training.mixed_precision_param"
COMPILE = "compile.enable"
CONVERTERS = "model.converters"


class _Candidate(NamedTuple):
    """Of the candidates of a kind, at most one is advised."""

    kind: str
    why: str
    changes: Changes
    is_traced: bool = True
    least_gain: float = LEAST_GAIN


def advise(plan: JobPlan, resolved: ResolvedJob, *, use_cache: bool = True) -> list[Advice]:
    """What to change next in the job of a plan, the shortest step first; [] if nothing helps.

    Only a plan with the times of a GPU has advice. Memory is composed. Of a plan that was traced
    whole, it is scaled to that, and may be a few percent off.
    """
    if plan.prediction is None or plan.hardware is None or plan.hardware.kind == "cpu":
        return []
    return _Advisor(plan, resolved, plan.hardware, use_cache).advise()


class _Advisor:
    def __init__(
        self, plan: JobPlan, resolved: ResolvedJob, hardware: Hardware, use_cache: bool
    ) -> None:
        assert plan.prediction is not None
        self._plan, self._resolved, self._hardware = plan, resolved, hardware
        self._config, self._dims = resolved.config, plan.dims
        self._step, self._idle = plan.prediction.step, plan.prediction.bubble
        self._busiest = min(self._step.ranks.values(), key=lambda one: one.idle_seconds)
        self._is_compiled, self._use_cache = self._config.compile.enable, use_cache
        self._is_fsdp = uses_fsdp(resolved)
        # What is traced whole can take a little more than what is scaled.
        self._spare = 1.0 if plan.method == PIECES else SPARE
        self._spare /= 1.0 if hardware.accuracy else 1 - MARGIN
        self._batches = resolved.global_batch_size // (
            self._config.training.local_batch_size * self._dims.dp
        )

    def advise(self) -> list[Advice]:
        is_too_large = not self._fits(self._plan)
        tried = [*(self._smaller() if is_too_large else self._faster())]
        found = self._best(tried, is_too_large)
        if is_too_large and not found:
            both = (
                one._replace(changes={**one.changes, **FULL})
                for one in tried
                if one.kind != "recomputation"
            )
            found = self._best(both, is_too_large)
        return found

    def _best(self, candidates: Iterable[_Candidate], is_too_large: bool) -> list[Advice]:
        best: dict[str, Advice] = {}
        whole, traced = None, 0
        for one in candidates:
            traced += one.is_traced
            if one.is_traced and traced > MOST_TRACED:
                continue
            other = self._planned(one.changes)
            if other is None or other.prediction is None:
                continue
            seconds = other.prediction.step.seconds
            known = best.get(one.kind)
            gain = 1 - seconds / self._step.seconds
            if (known and known.seconds <= seconds) or (not is_too_large and gain < one.least_gain):
                continue
            # A job that was traced whole takes other gaps than its pieces.
            whole = whole or self._planned({})
            if whole is None:
                return []
            scale = self._plan.reserved_bytes / whole.reserved_bytes
            if self._fits(other, scale * self._spare):
                reserved = round(scale * other.reserved_bytes)
                num_bytes = other.device_bytes - other.reserved_bytes + reserved
                best[one.kind] = self._advice(one, seconds, num_bytes)
        return sorted(best.values(), key=lambda one: one.seconds)[:MOST]

    def _planned(self, changes: Changes) -> JobPlan | None:
        """The composed plan of the changed job; None if it is not legal, or another job."""
        ranks, is_compiled = self._dims.world_size, changes.get(COMPILE, self._is_compiled)
        try:
            # A GPU takes no more for compiled blocks than for eager ones, which are traced sooner.
            resolved = resolve_job(override(self._config, {**changes, COMPILE: False}), ranks)
            if resolved.global_batch_size != self._resolved.global_batch_size:
                return None
            return plan_job(
                resolved,
                self._hardware,
                is_compiled=is_compiled,
                method=PIECES,
                use_cache=self._use_cache,
            )
        except (ConfigError, TraceError):
            return None

    def _fits(self, plan: JobPlan, scale: float = 1.0) -> bool:
        host = self._hardware.host
        fits_host = host is None or plan.host_bytes <= host.num_bytes
        return self._excess(plan, scale) <= 0 and fits_host

    def _excess(self, plan: JobPlan, scale: float = 1.0) -> float:
        """The bytes that a run may take beyond the device's, where its peak is `scale` times."""
        known = self._hardware.accuracy
        most = plan.reserved_bytes * scale * (known.memory[1] if known else 1.0)
        return most + plan.device_bytes - plan.reserved_bytes - self._hardware.memory.num_bytes

    def _advice(self, one: _Candidate, seconds: float, num_bytes: int) -> Advice:
        changes = {key: value for key, value in one.changes.items() if value is not None}
        keys = ", ".join(f"{key} = {show(value)}" for key, value in changes.items())
        ratio = seconds / self._step.seconds - 1
        about = "" if self._plan.method == PIECES else "about "
        than = f"{abs(ratio):.0%} {'more' if ratio > 0 else 'less'}" if abs(ratio) >= 0.005 else ""
        text = (
            f"{one.why}: with {keys}, a step takes {format_seconds(seconds)} "
            f"({than or 'as long'}) and a rank {about}{format_bytes(num_bytes)}"
        )
        if not self._fits(self._plan):
            text += ", which fits"
        if one.kind in OTHER_NUMBERS:
            text += "; its numbers are others, by rounding"
        return Advice(one.why, dict(one.changes), seconds, num_bytes, text)

    # What the plan says

    def _exposed(self, *axes: str) -> float:
        """The share of the step in which the busiest rank waits for these axes."""
        traffic = self._busiest.traffic
        seconds = sum(one.exposed_seconds for one in traffic if one.axis in axes)
        return seconds / self._step.seconds

    def _computing(self, kind: str) -> float:
        return self._busiest.compute_seconds.get(kind, 0.0) / self._step.seconds

    def _lighter(self) -> int:
        """How many RECOMPUTATIONS keep more than the job's own; -1 if that is another."""
        now = self._config.activation_checkpoint
        option = {space.OPTION: now.selective_ac_option} if now.mode == "selective" else {}
        own = {space.MODE: now.mode, **option}
        return RECOMPUTATIONS.index(own) if own in RECOMPUTATIONS else -1

    # Changes

    def _smaller(self) -> Iterator[_Candidate]:
        """Changes that may take less memory, those that need no trace first."""
        dims, training = self._dims, self._config.training
        peak = max(self._plan.ranks, key=lambda one: one.reserved or one.peak.num_bytes).peak
        kind, size = max(peak.bytes_of.items(), key=lambda item: item[1])
        why = f"memory is {size / peak.num_bytes:.0%} {kind}"
        if dims.dp_replicate > 1:
            shards = dims.dp_shard * dims.dp_replicate
            degrees = {space.REPLICATE: 1, space.SHARD: shards}
            yield _Candidate("data parallel", why, degrees, is_traced=not self._is_fsdp)
        if self._config.parallelism.fsdp_reshard_after_forward != "always" and self._is_fsdp:
            yield _Candidate("reshard", why, {space.RESHARD: "always"}, is_traced=False)
        if self._hardware.host is not None and not offloads(self._resolved):
            offload = {space.OFFLOAD: True}
            yield _Candidate("offload", why, offload, is_traced=not self._is_fsdp)
        yield from self._schedules(why)
        lighter, activations = self._lighter(), peak.bytes_of.get("activations", 0)
        # Only as many blocks as it takes, with a tenth to spare.
        excess = max(1.0, self._excess(self._plan))
        if lighter == 0 and 2 < (interval := int(0.9 * activations / excess)) < MOST_INTERVAL:
            changes = {space.MODE: "selective", space.OPTION: str(interval)}
            yield _Candidate("recomputation", why, changes)
        for heavier in RECOMPUTATIONS[lighter + 1 :]:
            yield _Candidate("recomputation", why, heavier)
        if self._resolved.pipeline is not None:
            size = self._resolved.pipeline.microbatch_size
            if size > 1:
                yield _Candidate("batch", why, {space.MICROBATCH: size // 2})
        elif training.local_batch_size > 1:
            yield _Candidate("batch", why, {space.LOCAL_BATCH: training.local_batch_size // 2})
        if 2 * dims.tp <= self._hardware.node.num_ranks and dims.dp_shard % 2 == 0:
            yield _Candidate("tensor parallel", why, self._with_tp(2 * dims.tp))

    def _faster(self) -> Iterator[_Candidate]:
        """Changes that may save time: those of the largest figures of the plan."""
        yield from self._of_kernels()
        yield from self._of_data_parallel()
        if self._idle >= LEAST_IDLE and self._resolved.pipeline is not None:
            why = f"the pipeline's ranks are idle for {self._idle:.0%} of the step"
            yield from self._schedules(why)
            if (size := self._resolved.pipeline.microbatch_size) > 1:
                yield _Candidate("batch", why, {space.MICROBATCH: size // 2})
        dims, per_node = self._dims, self._hardware.node.num_ranks
        share = self._exposed("tp")
        why = f"tp is exposed for {share:.0%} of the step"
        if dims.tp > per_node:
            spans = f"tp spans nodes, and is exposed for {share:.0%} of the step"
            yield _Candidate("tensor parallel", spans, self._with_tp(per_node))
        elif dims.tp > 1 and share >= LEAST_SHARE:
            yield _Candidate("tensor parallel", why, self._with_tp(dims.tp // 2))
        if (lighter := self._lighter()) > 0:
            again = 1 - (self._step.mfu or self._step.hfu) / self._step.hfu
            why = f"{again:.0%} of all operations are recomputed"
            for changes in RECOMPUTATIONS[:lighter]:
                yield _Candidate("recomputation", why, changes)
            if self._resolved.pipeline is None and not self._config.training.local_batch_size % 2:
                half = {space.LOCAL_BATCH: self._config.training.local_batch_size // 2}
                yield _Candidate("recomputation", why, {**RECOMPUTATIONS[0], **half})
        if self._resolved.pipeline is None and self._batches % 2 == 0:
            why = f"a rank has {self._batches} batches one after another"
            size = 2 * self._config.training.local_batch_size
            yield _Candidate("batch", why, {space.LOCAL_BATCH: size})

    def _of_kernels(self) -> Iterator[_Candidate]:
        """Another dtype of products, and compiled blocks."""
        training, peak = self._config.training, self._hardware.peak
        least = LEAST_GAIN_OF_KERNELS
        if peak(LOW) > 2 * peak(training.param_dtype):
            why = f"products compute in {training.param_dtype}"
            yield _Candidate("dtype", why, {BFLOAT16: LOW}, least_gain=least)
        if not self._is_compiled and (share := self._computing(MEMORY_BOUND)) >= LEAST_SHARE:
            why = f"memory-bound operators take {share:.0%} of the step"
            yield _Candidate("compile", why, {COMPILE: True}, is_traced=False, least_gain=least)
        is_known = peak("float8") > peak(LOW) and not FLOAT8.is_on(self._config)
        # Eager code scales and casts in operators of their own.
        if is_known and self._is_compiled and training.param_dtype == LOW:
            why = f"matrix products take {self._computing(PRODUCT):.0%} of the step"
            changes: dict[str, Any] = {CONVERTERS: [*self._config.model.converters, SECTION]}
            if self._dims.num_weight_shards > 1:
                changes[f"{SECTION}.enable_fsdp_float8_all_gather"] = True
            yield _Candidate("float8", why, changes, least_gain=least)

    def _of_data_parallel(self) -> Iterator[_Candidate]:
        """Replicas of nodes, or weights that stay gathered, where FSDP is exposed."""
        dims, per_node = self._dims, self._hardware.node.num_ranks
        share = self._exposed("dp_shard", "dp_shard_cp")
        if share < LEAST_SHARE:
            return
        why = f"FSDP is exposed for {share:.0%} of the step"
        shards = max(1, per_node // (dims.cp * dims.tp))
        replicas, rest = divmod(dims.dp_shard, shards)
        if dims.dp_shard > shards > 1 and not rest:
            degrees = {space.REPLICATE: dims.dp_replicate * replicas, space.SHARD: shards}
            yield _Candidate("data parallel", why, degrees, is_traced=False)
        if self._config.parallelism.fsdp_reshard_after_forward != "never":
            yield _Candidate("reshard", why, {space.RESHARD: "never"}, is_traced=False)

    def _schedules(self, why: str) -> Iterator[_Candidate]:
        if self._resolved.pipeline is None or self._resolved.pipeline.is_from_file:
            return
        config = self._config
        num_blocks = sum("." in name for name in split_points(config, self._resolved.model))
        per_node = self._hardware.node.num_ranks
        plans = space.Space(config, self._dims.world_size, per_node, num_blocks, {})
        for name, chunks in SCHEDULES:
            # Both halves of a split backward pass would recompute.
            if name == SPLIT and self._config.activation_checkpoint.mode != "none":
                continue
            per_stage = plans.layers_per_stage(name, self._dims.pp, chunks)
            changes = {space.SCHEDULE: name, space.PER_STAGE: per_stage}
            is_new = any(space.value_of(config, key) != value for key, value in changes.items())
            if per_stage != 0 and is_new:
                yield _Candidate("schedule", why, changes, is_traced=False)

    def _with_tp(self, tp: int) -> dict[str, Any]:
        """Another degree of tp; the ranks of dp_shard become more or fewer."""
        shards, rest = divmod(self._dims.dp_shard * self._dims.tp, tp)
        if rest:
            return {space.TP: tp}
        changes = {space.TP: tp, space.SHARD: shards}
        at_once = self._resolved.global_batch_size // (self._dims.dp_replicate * shards)
        if self._resolved.pipeline is not None:
            at_once //= self._batches
        local = self._config.training.local_batch_size
        if self._resolved.pipeline is not None or at_once < local:
            changes[space.LOCAL_BATCH] = at_once
        return changes
