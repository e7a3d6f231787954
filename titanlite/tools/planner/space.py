"""The plans of a job for a number of ranks, as changes of its keys. No torch.

    Space.candidates -> every combination of degrees, schedule, microbatch, AC, FSDP's policy, and
                        asynchronous TP
    Space.neighbours -> a plan with one of its layouts changed

A layout leaves the degrees as they are and changes where tensors are and how they move: loss
parallel, the order and rotation of context parallelism, the split of the blocks over stages.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config import JobConfig
from titanlite.mesh.parallel_dims import divisors
from titanlite.schedule import SCHEDULES as SCHEDULE_KINDS
from titanlite.schedule import schedule_name

Changes = Mapping[str, Any]
"""Keys of a job ("section.key") and their values in a plan."""

PP, CP, TP = (f"parallelism.{name}_parallel_degree" for name in ("pipeline", "context", "tensor"))
REPLICATE, SHARD = (f"parallelism.data_parallel_{name}_degree" for name in ("replicate", "shard"))
EP = "parallelism.expert_parallel_degree"
DEGREES = {"pp": PP, "dp": REPLICATE, "fsdp": SHARD, "cp": CP, "tp": TP, "ep": EP}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MODE = "activation_checkpoint.mode"
OPTION = "activation_checkpoint.selective_ac_option"
RESHARD = "parallelism.fsdp_reshard_after_forward"

ASYNC_TP = "parallelism.enable_async_tensor_parallel"
ASYNC_BACKEND = "parallelism.async_tensor_parallel_backend"
WHOLE_LOSS = "parallelism.disable_loss_parallel"
ORDER = "parallelism.context_parallel_load_balancer"
ROTATION = "parallelism.context_parallel_rotate_method"
FIRST_LESS = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST_LESS = "parallelism.pipeline_parallel_last_stage_less_layers"
OFFLOAD = "training.enable_cpu_offload"
OF_A_BLOCK = (ASYNC_TP, ASYNC_BACKEND, WHOLE_LOSS, ORDER, ROTATION)
"""The layouts that a plan's pieces depend on."""
OF_PIECES = (TP, CP, EP, MODE, OPTION, *OF_A_BLOCK)
"""The keys of a plan that its pieces depend on, beside the size of a microbatch."""
OF_STAGES = (FIRST_LESS, LAST_LESS)
NOT_CHOSEN = (WHOLE_LOSS, ORDER, ROTATION, OFFLOAD)
"""What no candidate changes, beside OF_STAGES."""

LAYOUTS = (*OF_A_BLOCK, *OF_STAGES)
KEPT_TRAINING = (LOCAL_BATCH, OFFLOAD)
"""Keys of [training] that a plan can change, beside the global batch that follows."""
CHANGED = (
    *(PP, CP, TP, REPLICATE, SHARD, EP, SCHEDULE, PER_STAGE, MICROBATCH, LOCAL_BATCH, GLOBAL_BATCH),
    *(MODE, OPTION, RESHARD, OFFLOAD, *LAYOUTS),
)
"""All keys that a plan can change."""

MICROBATCH_SIZES = (1, 2, 4, 8)
SCHEDULES = (
    ("1F1B", 1),
    ("GPipe", 1),
    ("ZB-H1", 1),
    ("ZB-H2", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
)
"""Schedules, with their stages per rank."""
ORDERS, ROTATIONS = ("headtail", "striped", "none"), ("alltoall", "allgather")
MOST_LESS = 4
"""The most blocks that embeddings or head count as, when blocks are split over stages."""
CHECKPOINTING: tuple[Changes, ...] = (
    {MODE: "none"},
    {MODE: "selective", OPTION: "op"},
    {MODE: "full"},
)


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
    has_host: bool = False
    """Whether the hardware has figures of a GPU's host, which CPU offload needs."""

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
                for of_experts, checkpointing, rest_of, of_tp in itertools.product(
                    self._expert_parallel(shards * cp * tp),
                    ({},) if {MODE, OPTION} & self.kept.keys() else CHECKPOINTING,
                    list(self._batches(pp, global_batch // dp, shards * cp > 1)),
                    self._async_values(tp),
                ):
                    plan = degrees | of_experts | dict(checkpointing) | rest_of
                    yield self._with(plan, of_tp)

    def _of(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return [self.kept[key]] if key in self.kept else values

    def _expert_parallel(self, room: int) -> list[dict[str, Any]]:
        """The EP degrees that divide `room`, the ranks among which EP chooses, and the experts."""
        if not self.num_experts:
            return [{}]
        legal = [ep for ep in divisors(room) if self.num_experts % ep == 0]
        return [{EP: ep} for ep in self._of(EP, legal)]

    def _batches(self, pp: int, per_rank: int, has_shards: bool) -> Iterator[dict[str, Any]]:
        if pp == 1:
            policies = ("default", "never") if has_shards else ("default",)
            for size in self._of(LOCAL_BATCH, MICROBATCH_SIZES):
                if per_rank % size == 0:
                    for policy in self._of(RESHARD, policies):
                        yield {LOCAL_BATCH: size, RESHARD: policy}
            return
        local = self.kept.get(LOCAL_BATCH, per_rank)
        for size in self._of(MICROBATCH, MICROBATCH_SIZES):
            if per_rank % local or local % size:
                continue
            for schedule, chunks in self._schedules():
                per_stage = self.layers_per_stage(schedule, pp, chunks)
                if per_stage != 0:
                    batches = {LOCAL_BATCH: local, MICROBATCH: size}
                    yield batches | {SCHEDULE: schedule, PER_STAGE: per_stage}

    def _schedules(self) -> Sequence[tuple[str, int]]:
        wanted = self.kept.get(SCHEDULE)
        if wanted is None:
            return SCHEDULES
        return [one for one in SCHEDULES if one[0] == wanted] or [(wanted, 1), (wanted, 2)]

    def layers_per_stage(
        self, schedule: str, pp: int, chunks: int, less: tuple[int, int] | None = None
    ) -> int | None:
        """The value that gives each rank `chunks` stages: None by default, 0 if there is none.

        `less`: as how many blocks embeddings and head count; by default as the job says.
        """
        if PER_STAGE in self.kept:
            return int(self.kept[PER_STAGE])
        if chunks == SCHEDULE_KINDS[schedule_name(schedule)].min_chunks:
            return None
        weight = self.num_blocks + sum(less or self._less)
        per_stage = -(-weight // (pp * chunks))
        return per_stage if -(-weight // per_stage) == pp * chunks else 0

    @property
    def _less(self) -> tuple[int, int]:
        """As how many blocks the job counts embeddings and head."""
        parallelism = self.config.parallelism
        return (
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
        )

    # Layouts

    def neighbours(self, plan: Changes) -> Iterator[dict[str, Any]]:
        """The plan with one layout changed, for each layout and value; not all are legal.

        A layout that is the job's own is not among the changes.
        """
        if plan[TP] > 1 and WHOLE_LOSS not in self.kept:
            yield self._with(plan, {WHOLE_LOSS: not self._now(plan, WHOLE_LOSS)})
        if plan[CP] > 1:
            for key, values in ((ORDER, ORDERS), (ROTATION, ROTATIONS)):
                for value in self._of(key, values):
                    if value != self._now(plan, key):
                        yield self._with(plan, {key: value})
        yield from self.splits(plan)
        yield from self.offloaded(plan)

    def offloaded(self, plan: Changes) -> Iterator[dict[str, Any]]:
        """The plan with CPU offload, if it is without, and offload can be planned.

        It takes less memory of the device, and is not faster: it does the same work, copies
        shards and gradients beside it, and updates parameters at the speed of the host's memory.
        So it is of use where the plan itself does not fit, or on the front of memory.
        """
        is_known = self.has_host and self.config.job.device == "cuda"
        if is_known and OFFLOAD not in self.kept and not self._now(plan, OFFLOAD):
            yield {**plan, OFFLOAD: True}

    def _now(self, plan: Changes, key: str) -> Any:
        return plan[key] if key in plan else value_of(self.config, key)

    def _with(self, plan: Changes, layout: Changes) -> dict[str, Any]:
        own = {key for key, value in layout.items() if value == value_of(self.config, key)}
        # The two keys of a split belong together, and so do those of asynchronous TP.
        own = own if own >= set(layout) else set()
        return {key: value for key, value in {**plan, **layout}.items() if key not in own}

    def _async_values(self, tp: int) -> list[dict[str, Any]]:
        if tp == 1 or {ASYNC_TP, ASYNC_BACKEND} & self.kept.keys():
            return [{}]
        return [self._async(is_on=is_on) for is_on in (False, True)]

    def _async(self, *, is_on: bool) -> dict[str, Any]:
        """Asynchronous TP by the compiler, or of eager code by rings."""
        compiled = self.config.compile
        by_compiler = (
            compiled.enable and "model" in compiled.components and compiled.backend == "inductor"
        )
        backend = "auto" if by_compiler or not is_on else "ring"
        own = self.config.parallelism
        if is_on and own.enable_async_tensor_parallel:
            backend = own.async_tensor_parallel_backend
        return {ASYNC_TP: is_on, ASYNC_BACKEND: backend}

    def splits(self, plan: Changes) -> Iterator[dict[str, Any]]:
        """The plan with other numbers of blocks in its stages, each split once."""
        if plan[PP] == 1:
            return
        fixed = {FIRST_LESS, LAST_LESS, PER_STAGE} & self.kept.keys()
        parallelism = self.config.parallelism
        own = parallelism.module_fqns_per_model_part, parallelism.pipeline_parallel_schedule_csv
        if fixed or any(own):
            return
        now = self._now(plan, FIRST_LESS), self._now(plan, LAST_LESS)
        num_stages = self._num_stages(plan, now)
        chunks = num_stages // plan[PP]
        seen = {self._blocks_of_stages(num_stages, now)}
        counts = range(MOST_LESS + 1)
        # The job's own numbers first, of those that give the same blocks.
        for less in (self._less, *itertools.product(counts, counts)):
            blocks = self._blocks_of_stages(num_stages, less)
            per_stage = self.layers_per_stage(plan[SCHEDULE], plan[PP], chunks, less)
            if per_stage == 0 or blocks in seen or min(blocks[0], blocks[-1]) < 0:
                continue
            seen.add(blocks)
            new = {**plan, PER_STAGE: per_stage}
            yield self._with(new, {FIRST_LESS: less[0], LAST_LESS: less[1]})

    def _num_stages(self, plan: Changes, less: tuple[int, int]) -> int:
        per_stage = plan.get(PER_STAGE)
        if per_stage is None:
            kind = SCHEDULE_KINDS[schedule_name(plan[SCHEDULE])]
            return int(plan[PP]) * kind.min_chunks
        return -(-(self.num_blocks + sum(less)) // int(per_stage))

    def _blocks_of_stages(self, num_stages: int, less: tuple[int, int]) -> tuple[int, ...]:
        """The number of blocks of each stage, as config/pipeline.py shares them out."""
        per_stage, extra = divmod(self.num_blocks + sum(less), num_stages)
        counts = [per_stage + (stage < extra) for stage in range(num_stages)]
        counts[0] -= less[0]
        counts[-1] -= less[1]
        return tuple(counts)

    def with_layouts_of(
        self, plan: Changes, model: Changes, *, is_split: bool = True
    ) -> dict[str, Any]:
        """The plan with the layouts of `model` that are no choice of a candidate.

        The split of blocks is copied between plans with the same number of stages.
        """
        found = {**plan, **{key: model[key] for key in NOT_CHOSEN if key in model}}
        if is_split and FIRST_LESS in model and plan[PP] > 1:
            less = model[FIRST_LESS], model[LAST_LESS]
            if self._num_stages(plan, self._less) == self._num_stages(model, less):
                chunks = self._num_stages(plan, self._less) // plan[PP]
                per_stage = self.layers_per_stage(plan[SCHEDULE], plan[PP], chunks, less)
                if per_stage != 0:
                    found |= {FIRST_LESS: less[0], LAST_LESS: less[1], PER_STAGE: per_stage}
        return found

    def without_changed_layouts(self, plan: Changes) -> dict[str, Any]:
        """The candidate that `plan` is, with other layouts."""
        found = {k: v for k, v in plan.items() if k not in (*NOT_CHOSEN, *OF_STAGES)}
        if FIRST_LESS in plan:
            chunks = self._num_stages(plan, (plan[FIRST_LESS], plan[LAST_LESS])) // plan[PP]
            found[PER_STAGE] = self.layers_per_stage(plan[SCHEDULE], plan[PP], chunks)
        return found


def without_layouts(plan: Changes) -> frozenset[tuple[str, Any]]:
    """What a plan has in common with those that differ from it in layouts alone."""
    return frozenset(item for item in plan.items() if item[0] not in LAYOUTS)


def describe(changes: Mapping[str, Any]) -> str:
    """A plan in words: "fsdp 8 x tp 4, local batch 2, AC full"."""
    of = {name: changes.get(key, 1) for name, key in DEGREES.items()}
    degrees = [f"{name} {degree}" for name, degree in of.items() if degree > 1]
    words = [" x ".join(degrees) or "one rank"]
    if changes[PP] > 1:
        chunks = f", {changes[PER_STAGE]} blocks a stage" if changes.get(PER_STAGE) else ""
        words += [f"{changes[SCHEDULE]}{chunks}", f"microbatch {changes[MICROBATCH]}"]
    else:
        words.append(f"local batch {changes[LOCAL_BATCH]}")
    if changes.get(MODE, "none") != "none":
        words.append(f"AC {changes[MODE]}")
    if changes.get(RESHARD, "default") != "default":
        words.append(f"reshard {changes[RESHARD]}")
    if changes.get(OFFLOAD):
        words.append("CPU offload")
    if ASYNC_TP in changes:
        words.append("async TP" if changes[ASYNC_TP] else "no async TP")
    if WHOLE_LOSS in changes:
        words.append("whole loss" if changes[WHOLE_LOSS] else "loss parallel")
    words += [f"CP {changes[key]}" for key in (ORDER, ROTATION) if key in changes]
    if FIRST_LESS in changes:
        words.append(f"embeddings as {changes[FIRST_LESS]} blocks, head as {changes[LAST_LESS]}")
    return ", ".join(words)


def value_of(config: JobConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def degrees_of(plan: Changes) -> tuple[int, ...]:
    """The set of degrees of a plan."""
    return tuple(plan.get(key, 1) for key in DEGREES.values())


def passes_of(plan: Changes) -> tuple[int, ...]:
    """The degrees that the passes of a block depend on."""
    return plan[TP], plan[CP], plan.get(EP, 1)


def are_near(one: Changes, other: Changes) -> bool:
    """Whether two plans of the same degrees differ in one choice, of sizes by a factor of 2.

    The choices are schedule, size of a microbatch, activation checkpointing, FSDP's policy and
    asynchronous TP. To recompute less of a smaller microbatch counts as one.
    """
    (_, size, recomputed), (_, other_size, other_recomputed) = sizes_of(one), sizes_of(other)
    larger, recomputes_more = size / other_size, recomputed - other_recomputed
    if not 0.5 <= larger <= 2:
        return False
    choices = (SCHEDULE, PER_STAGE), (RESHARD,), (ASYNC_TP,)
    others = sum(any(one.get(k) != other.get(k) for k in choice) for choice in choices)
    is_traded = (larger - 1) * recomputes_more > 0
    return others + (is_traded or (larger != 1) + (recomputes_more != 0)) == 1


def choices_of(plan: Changes) -> frozenset[tuple[str, Any]]:
    """All of a plan but how its data ranks are split into replicas and shards."""
    return frozenset(item for item in plan.items() if item[0] not in (REPLICATE, SHARD, RESHARD))


def sizes_of(plan: Changes) -> tuple[frozenset[tuple[str, Any]], int, int]:
    """What the memory of a plan depends on: all but the next two; sequences; recomputation.

    Memory grows with the sequences of a microbatch and falls with recomputation (0: none).
    """
    # A pipeline that splits its backward passes can take more memory with recomputation.
    key, *modes = (MICROBATCH,) if plan[PP] > 1 else (LOCAL_BATCH, MODE, OPTION)
    others = frozenset(item for item in plan.items() if item[0] not in (key, *modes))
    recomputed = [one[MODE] for one in CHECKPOINTING].index(plan[MODE]) if MODE in plan else 0
    return others, plan[key], recomputed


def _weight(plan: Changes) -> tuple[int, bool, int, bool]:
    """By it, what takes less memory comes first, asynchronous TP last; schedules keep their order.

    On slow links asynchronous TP says little of what a plan is like without.
    """
    _, size, recomputed = sizes_of(plan)
    return size, plan.get(RESHARD) == "never", -recomputed, bool(plan.get(ASYNC_TP))


def groups(
    plans: Sequence[dict[str, Any]], *, by_choices: bool = True
) -> list[list[dict[str, Any]]]:
    """The plans by what their pieces depend on, beside microbatches and recomputation.

    Unless `by_choices`, by their passes alone. What takes the least memory comes first.
    """
    found: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for plan in sorted(plans, key=_weight):
        key: tuple[Any, ...] = passes_of(plan)
        if by_choices:
            is_sharded = plan[SHARD] * plan[CP] > 1 or plan[PP] > 1 or plan.get(OFFLOAD)
            key += is_sharded, *(plan.get(one) for one in OF_A_BLOCK)
        found[key].append(plan)
    # Few plans first would leave one worker with the largest group at the end.
    return sorted(found.values(), key=len, reverse=True)
