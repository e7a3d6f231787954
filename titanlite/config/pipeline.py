"""The pipeline plan of a job: stages of modules, microbatches and a schedule; torch-free.

    JobConfig + ParallelDims + the model's sizes -> make_pipeline_plan -> PipelinePlan

A job without a valid plan is refused; otherwise the job is built from this plan.
"""

import contextlib
import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.model import load_model_spec
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError, TitanliteError, collecting, nearest, one_of, quote
from titanlite.mesh.parallel_dims import ParallelDims, divisors
from titanlite.schedule import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    check,
    make_schedule,
    read_csv,
    schedule_name,
)
from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    UNSHARD,
)

KEY = "parallelism.pipeline_parallel_"
# A schedule lists every action of every microbatch.
MOST_MICROBATCHES = 10_000
BACKWARDS = (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is split into stages, which rank holds each stage, and the order of actions.

    `stages` holds the names of each stage's modules. A batch of local_batch_size sequences is split
    into `schedule.num_microbatches` microbatches of `microbatch_size`. `is_from_file`: the schedule
    was read from a CSV file.
    """

    schedule: Schedule
    stages: tuple[tuple[str, ...], ...]
    microbatch_size: int
    is_from_file: bool = False

    def stages_of(self, rank: int) -> list[int]:
        """The stages of the rank with this index on the pp axis, ascending."""
        return [stage for stage, place in enumerate(self.schedule.stage_to_rank) if place == rank]


def make_pipeline_plan(config: JobConfig, dims: ParallelDims, model: Any) -> PipelinePlan:
    """The plan of a job whose pipeline degree is above 1; `model` holds the model's sizes.

    Raises ConfigError if stages, microbatches and schedule do not fit together.
    """
    names = split_points(config, model)
    if not names:
        raise ConfigError(
            f"{KEY}degree: {config.model.name} has no modules to split: its plan names no blocks; "
            "name them in its ParallelPlan, or give its configuration class module_names, the "
            "modules in the order of the forward pass"
        )
    problems: list[str] = []
    path = config.parallelism.pipeline_parallel_schedule_csv
    num_microbatches: int | None = None
    num_stages: int | None = None
    schedule: Schedule | None = None
    stages: tuple[tuple[str, ...], ...] = ()
    with collecting(problems):
        num_microbatches = _count_microbatches(config)
    if not path:
        with collecting(problems):
            num_stages = _count_stages(config, dims, names)
    if path and num_microbatches is not None:
        with collecting(problems):
            schedule = _load_schedule(config, dims, num_microbatches)
            num_stages = schedule.num_stages
    if num_stages is not None:
        with collecting(problems):
            given = config.parallelism.module_fqns_per_model_part
            if given is None:
                stages = _share_out(config, names, num_stages)
            else:
                stages = tuple(map(tuple, given))
                _check_given(stages, names, num_stages)
    # Generating a schedule with far more stages than blocks would take too long.
    if not path and num_microbatches is not None and num_stages is not None and stages:
        with collecting(problems):
            schedule = _make_schedule(config, dims, num_microbatches, num_stages)
    if problems or schedule is None:
        raise ConfigError(*problems)
    size = config.parallelism.pipeline_parallel_microbatch_size
    return PipelinePlan(schedule, stages, size, bool(path))


def split_points(config: JobConfig, model: Any) -> tuple[str, ...]:
    """The modules between which a pipeline can split, in the order of the forward pass.

    They are those of `model`, the model's own configuration, or else of its plan; then the model is
    built on "meta".
    """
    names: tuple[str, ...] = getattr(model, "module_names", ())
    if names:
        return names
    from titanlite.models.build import module_names

    try:
        return module_names(load_model_spec(config), model)
    except ConfigError:
        raise
    except TitanliteError as error:
        raise ConfigError(f"model.name: {error}") from None


def _count_microbatches(config: JobConfig) -> int:
    batch = config.training.local_batch_size
    size = config.parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        raise ConfigError(
            f"{KEY}microbatch_size: {size} does not divide training.local_batch_size {batch}; "
            f"give {nearest(size, divisors(batch))}"
        )
    if batch // size > MOST_MICROBATCHES:
        raise ConfigError(
            f"{KEY}microbatch_size: {size} splits training.local_batch_size {batch} into "
            f"{batch // size} microbatches, but at most {MOST_MICROBATCHES} are supported; give a "
            "larger value, or a smaller training.local_batch_size"
        )
    return batch // size


def _load_schedule(config: JobConfig, dims: ParallelDims, num_microbatches: int) -> Schedule:
    path = config.parallelism.pipeline_parallel_schedule_csv
    size = config.parallelism.pipeline_parallel_microbatch_size
    try:
        schedule = read_csv(path)
        # Error messages name the file.
        check(replace(schedule, name=path))
    except ScheduleError as error:
        raise ConfigError(f"{KEY}schedule_csv: {error}; give a valid schedule") from error
    if schedule.num_ranks != dims.pp:
        raise ConfigError(
            f"{KEY}schedule_csv: {path} is a schedule for {schedule.num_ranks} ranks; "
            f"set pipeline_parallel_degree to {schedule.num_ranks}, or give a file with "
            f"{dims.pp} rows"
        )
    if schedule.num_microbatches != num_microbatches:
        raise ConfigError(
            f"{KEY}schedule_csv: {path} has {schedule.num_microbatches} microbatches, but "
            f"the job has {num_microbatches} "
            f"(training.local_batch_size {config.training.local_batch_size} / "
            f"pipeline_parallel_microbatch_size {size}); change one of them so that there are "
            f"{schedule.num_microbatches}"
        )
    if idle := set(range(dims.pp)) - set(schedule.stage_to_rank):
        raise ConfigError(
            f"{KEY}schedule_csv: {path} has no stage on rank {min(idle)}; give every rank a stage"
        )
    for stage in range(schedule.num_stages):
        _check_lowered(path, schedule, stage)
    last = schedule.num_stages - 1
    losses = [
        action.microbatch
        for action in schedule.compute(schedule.stage_to_rank[last])
        if action.stage == last and action.kind == FORWARD
    ]
    if losses != sorted(losses, key=lambda microbatch: microbatch or 0):
        # PyTorch's runtime assigns losses to microbatches by the order in which they are computed.
        raise ConfigError(
            f"{KEY}schedule_csv: {path} runs the forwards of stage {last}, the last one, out of "
            "order; run them by microbatch, from 0 up"
        )
    return schedule


def _check_lowered(path: str, schedule: Schedule, stage: int) -> None:
    """A table with communication actions must also have those of FSDP."""
    if all(action.kind in COMPUTE_KINDS for row in schedule.actions for action in row):
        return
    row = [
        part.kind
        for action in schedule.actions[schedule.stage_to_rank[stage]]
        for part in action.parts
        if part.stage == stage
    ]
    kinds = [kind for kind in row if kind in (UNSHARD, FORWARD, REDUCE_GRAD, *BACKWARDS)]
    if kinds[0] != UNSHARD or kinds[-1] != REDUCE_GRAD:
        raise ConfigError(
            f"{KEY}schedule_csv: {path} has sends and receives, but not {stage}{UNSHARD} before "
            f"stage {stage} computes and {stage}{REDUCE_GRAD} after it; add them, or keep only "
            "the compute actions"
        )


def _count_stages(config: JobConfig, dims: ParallelDims, names: Sequence[str]) -> int:
    parallelism = config.parallelism
    try:
        name = schedule_name(parallelism.pipeline_parallel_schedule)
    except ScheduleError as error:
        raise ConfigError(f"{KEY}schedule: {error}") from error
    kind = SCHEDULES[name]

    def is_legal(num_stages: int) -> bool:
        chunks, rest = divmod(num_stages, dims.pp)
        return rest == 0 and kind.min_chunks <= chunks <= (kind.max_chunks or chunks)

    takes = f"{name} needs {kind.min_chunks}{'' if kind.max_chunks else ' or more'} per rank"
    fewest = kind.min_chunks * dims.pp
    given = parallelism.module_fqns_per_model_part
    if given is not None:
        if not is_legal(len(given)):
            wanted = f"{fewest}" if kind.max_chunks else f"a multiple of {dims.pp} from {fewest} up"
            raise ConfigError(
                f"parallelism.module_fqns_per_model_part: {len(given)} parts for {dims.pp} ranks, "
                f"but {takes}; give {wanted}"
            )
        return len(given)
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if per_stage is None:
        return fewest
    weight = sum(_weigh(config, names))
    if not is_legal(-(-weight // per_stage)):
        # Larger values than the number of blocks would be no help.
        most = min(weight, len(names))
        legal = [n for n in range(1, most + 1) if is_legal(-(-weight // n))]
        advice = f"give {nearest(per_stage, legal)}" if legal else "remove this key"
        raise ConfigError(
            f"{KEY}layers_per_stage: {per_stage} splits {weight} blocks, counting embeddings and "
            f"output, into {-(-weight // per_stage)} stages for {dims.pp} ranks, but {takes}; "
            f"{advice}"
        )
    return -(-weight // per_stage)


def _make_schedule(
    config: JobConfig, dims: ParallelDims, num_microbatches: int, num_stages: int
) -> Schedule:
    def make(num_microbatches: int) -> Schedule:
        name = config.parallelism.pipeline_parallel_schedule
        schedule = make_schedule(name, dims.pp, num_microbatches, num_stages // dims.pp)
        # PyTorch's 1F1B fails if there are fewer microbatches than stages.
        if schedule.name == "1F1B" and num_microbatches < num_stages:
            raise ScheduleError(
                f"1F1B needs at least as many microbatches as stages ({num_stages}), "
                f"not {num_microbatches}"
            )
        return schedule

    def is_legal(num_microbatches: int) -> bool:
        if num_microbatches > MOST_MICROBATCHES:
            return False
        with contextlib.suppress(ScheduleError):
            return bool(make(num_microbatches))
        return False

    try:
        return make(num_microbatches)
    except ScheduleError as error:
        batch = config.training.local_batch_size
        size = config.parallelism.pipeline_parallel_microbatch_size
        below = range(num_microbatches - 1, 0, -1)
        above = range(num_microbatches + 1, 2 * max(num_microbatches, num_stages) + 1)
        found = [next(filter(is_legal, counts), None) for counts in (below, above)]
        batches = [size * count for count in found if count is not None]
        sizes = [size for size in divisors(batch) if is_legal(batch // size)]
        ways = [f"training.local_batch_size to {nearest(batch, batches)}"] if batches else []
        if sizes:
            ways.insert(0, f"it to {nearest(size, sizes)}")
        raise ConfigError(
            f"{KEY}microbatch_size: {size} splits training.local_batch_size {batch} into "
            f"{num_microbatches} microbatch{'es' * (num_microbatches != 1)}, but "
            f"{str(error).split(';')[0]}; set {', or '.join(ways)}"
        ) from error


def _weigh(config: JobConfig, names: Sequence[str]) -> tuple[int, int, int]:
    """The number of blocks, and the weights of embeddings and head, in blocks."""
    return (
        sum("." in name for name in names),
        config.parallelism.pipeline_parallel_first_stage_less_layers,
        config.parallelism.pipeline_parallel_last_stage_less_layers,
    )


def _share_out(
    config: JobConfig, names: Sequence[str], num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """Split the blocks evenly over the stages; the remainder goes to the first stages.

    As in TorchTitan, the embeddings count as `first_stage_less_layers` blocks of the first stage,
    and the output as `last_stage_less_layers` blocks of the last.
    """
    blocks, first_less, last_less = _weigh(config, names)
    first_block = next(i for i, name in enumerate(names) if "." in name)
    per_stage, extra = divmod(blocks + first_less + last_less, num_stages)
    if per_stage == 0 or num_stages > len(names):
        raise ConfigError(
            f"{KEY}degree: {num_stages} stages for {blocks} blocks, embeddings counted as "
            f"{first_less} and output as {last_less}; give fewer ranks, or a model of at least "
            f"{num_stages - first_less - last_less} blocks"
        )
    counts = [per_stage + (stage < extra) for stage in range(num_stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    for end, less, count in (("first", first_less, counts[0]), ("last", last_less, counts[-1])):
        if count < 0:
            raise ConfigError(
                f"{KEY}{end}_stage_less_layers: {less} is more than the {count + less} blocks of "
                f"a stage; give at most {count + less}"
            )
    cuts = [first_block + sum(counts[:stage]) for stage in range(num_stages + 1)]
    cuts[0], cuts[-1] = 0, len(names)
    return tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts))


def _check_given(
    stages: tuple[tuple[str, ...], ...], names: Sequence[str], num_stages: int
) -> None:
    key = "parallelism.module_fqns_per_model_part"
    if len(stages) != num_stages:
        raise ConfigError(
            f"{key}: {len(stages)} parts, but the schedule has {num_stages} stages; "
            f"give {num_stages} parts"
        )
    flat = [name for stage in stages for name in stage]
    for name in flat:
        if name not in names:
            match = difflib.get_close_matches(name, names, n=1)
            advice = f"did you mean {quote(match[0])}?" if match else f"give {one_of(names)}"
            raise ConfigError(f"{key}: the model has no module {quote(name)}; {advice}")
    if missing := [name for name in names if name not in flat]:
        raise ConfigError(f"{key}: no part has {quote(missing[0])}; add it to one")
    if [] in map(list, stages):
        raise ConfigError(f"{key}: a part is empty; give each at least one module")
    for name, expected in zip(flat, names, strict=False):
        if name != expected:
            raise ConfigError(
                f"{key}: {quote(name)} is listed where {quote(expected)} is next in the forward "
                "pass; list the modules in that order, each once"
            )
    if len(flat) > len(names):
        raise ConfigError(f"{key}: {quote(flat[len(names)])} is listed twice; list it once")
