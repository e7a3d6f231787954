"""Differences in what a step starts from: weights, data, positions, target count; torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from titanlite.mesh.parallel_dims import axes_where
from titanlite.tools.verify.differences import same_shards
from titanlite.tools.verify.evidence import Evidence, JobEvidence, ranks_of, worst
from titanlite.tools.verify.gradients import describe_exchanged
from titanlite.tools.verify.wording import listed


def explain_shards(e: Evidence) -> Iterator[str]:
    """Parameters that start with another rank's shard."""
    wrong = e.failed("start")
    swapped = set()
    for run in e.runs:
        for name in wrong:
            own = run.steps[0].weights.get(name)
            others = {r.expected_shards.get(name) for r in e.runs if r is not run}
            if own is not None and own.digest in others - {run.expected_shards.get(name)}:
                swapped.add(name)
    if swapped and not set(same_shards(e.runs)) & swapped:
        yield (
            f"ranks hold each other's shards of {e.named(swapped, 'parameter')}: "
            "each starting value is right, on the wrong rank. Look at the index by which a rank "
            "chooses its shard, and at the order of the ranks in the group"
        )


def explain_start(e: Evidence) -> Iterator[str]:
    wrong = e.failed("start")
    if not wrong:
        return
    if pairs := _exchanged_starts(e, wrong):
        yield from describe_exchanged(pairs, "starting value")
        return
    shown = e.named(wrong, "parameter")
    if alike := sorted(set(same_shards(e.runs)) & set(wrong)):
        yield (
            f"different shards have the same starting values: {e.named(alike, 'parameter')}. Each "
            "rank draws its shard as if it were the first. Draw each parameter at its full shape, "
            "from a generator seeded by its name, and keep the rank's slice"
        )
        return
    if any(split.step == 0 for split in e.found.splits):
        yield (
            f"replicas start with different values: {shown}. The ranks draw from different random "
            "states. Seed the generator of each parameter by its name, not by the rank"
        )
        return
    where = e.where(ranks_of(e, lambda run: worst(run, "weights", 0, wrong)))
    if all(_has_the_same_values(e, name) for name in wrong):
        yield (
            f"starting values are those of one process in another order, {where}: {shown}. Look at "
            "how shards are cut and put together: of a fused weight or bias (q, k and v; gate and "
            "up), each part is cut by itself, and put together by itself"
        )
        return
    yield (
        f"starting values differ from those on one process, {where}: {shown}. Look at how they are "
        "drawn and sharded"
    )


def _has_the_same_values(e: Evidence, name: str) -> bool:
    """Whether all parts of a parameter have the sum of squares that they have on one process."""
    parts = [run.steps[0].weights[name] for run in e.runs if name in run.steps[0].weights]
    own, known = sum(part.aa for part in parts), sum(part.bb for part in parts)
    return math.isclose(own, known, rel_tol=1e-12)


def _exchanged_starts(e: Evidence, wrong: list[str]) -> dict[str, str]:
    """Parameters that start, on every rank, with the values of another one."""
    pairs = {}
    for name in wrong:
        same = None
        for run in e.runs:
            if (own := run.steps[0].weights.get(name)) is not None:
                others = {n for n, digest in run.expected_shards.items() if digest == own.digest}
                same = others - {name} if same is None else same & others
        if same:
            pairs[name] = min(same)
    return pairs


def explain_data(e: JobEvidence) -> Iterator[str]:
    step = max(1, e.step)
    per_rank = e.batch // e.dims.dp
    wrong: dict[int, tuple[int, ...]] = {}
    read: dict[tuple[int, ...], tuple[int, ...]] = {}
    for run in e.runs:
        place = tuple(run.coordinates[axis] for axis in axes_where(batch="samples"))
        read[place] = run.steps[step].sequences
        first = e.dims.data_rank(run.rank) * per_rank
        if read[place] != tuple(range(first, first + per_rank)):
            wrong[run.rank] = read[place]
    counts = Counter(number for own in read.values() for number in own if number != -1)
    batch = range(e.batch)
    if all(counts[number] == 1 for number in batch):
        # The ranks may split the batch in another order: together they read the same batch.
        wrong = {}
    elif not wrong:
        often = [number for number in batch if counts[number] > 1]
        never = [number for number in batch if not counts[number]]
        yield (
            f"the data depend on the plan: at step {step} the data-parallel ranks read sequences "
            f"{listed(often)} of the batch more than once and {listed(never)} not at all. Their "
            "data-parallel rank is computed wrongly: derive it from all data-parallel axes"
        )
    if wrong:
        rank, sequences = next(iter(wrong.items()))
        first = e.dims.data_rank(rank) * per_rank
        strange = sum(one == -1 for one in sequences)
        got = (
            f"{strange} sequences that are not in the batch of one process"
            if strange
            else f"sequences {listed(sequences)} of the batch"
        )
        yield (
            f"the data depend on the plan: at step {step} rank {rank} reads {got} instead of "
            f"sequences {first} to {first + per_rank - 1}. Wrong sequences are read "
            f"{e.where(wrong)}. The order of samples must not "
            "depend on the data-parallel degree: let the sampler count samples over all ranks"
        )
    moved = [run.rank for run in e.runs if not run.steps[step].positions_agree]
    if moved:
        layout = e.job.config.parallelism.context_parallel_load_balancer
        yield (
            "positions are wrong under context parallelism: the model does not receive the "
            f"positions of the rank's tokens in the {layout} layout, {e.where(moved)}. Shard the "
            "positions with the layout of the tokens; do not compute them from an offset"
        )
    shifted = [run.rank for run in e.runs if not run.steps[step].targets_agree]
    if shifted and not wrong:
        yield (
            f"targets do not match the tokens, {e.where(shifted)}: make the targets before the "
            "sequence is sharded"
        )


def explain_stage_positions(e: JobEvidence) -> Iterator[str]:
    """Pipeline stages that take positions and do not receive those of their tokens."""
    blind = {t.rank: t.blind_stages for t in e.traces if t.blind_stages}
    if not blind:
        return
    stages = sorted({stage for of_rank in blind.values() for stage in of_rank})
    which = next(words for of_rank in blind.values() for words in of_rank.values())
    who = f"stage{'s' * (len(stages) > 1)} {listed(stages)} of the pipeline"
    because = (
        ": each rank then counts its tokens from 0, which is wrong under context parallelism"
        if which == "missing" and e.dims.cp_enabled
        else ""
    )
    yield (
        f"the `positions` argument of {who if e.dims.pp_enabled else 'the model'} is {which}, "
        f"{e.where(blind)}{because}. Pass every stage the positions "
        "of its tokens, sharded like the tokens"
    )


def explain_count(e: Evidence) -> Iterator[str]:
    """A target count that is wrong, and the same, on every rank; see also `explain_counts`."""
    step = max(1, e.step)
    known = e.reference[step].num_targets
    counts = {run.steps[step].num_targets for run in e.runs}
    if len(counts) == 1 and counts != {known} and not e.failed("start"):
        ratio = counts.pop() / known
        yield (
            f"the loss is divided by {ratio:.6g} times the number of targets in the step"
            f"{e.equals(ratio)}: targets are counted on several ranks that hold the same tokens, "
            "or not on all ranks. Count each target once"
        )


def explain_counts(e: Evidence) -> Iterator[str]:
    step = max(1, e.step)
    counts = {run.steps[step].num_targets for run in e.runs}
    if len(counts) > 1:
        yield (
            f"ranks count different numbers of targets in a step ({listed(sorted(counts))}). "
            f"The step has {e.reference[step].num_targets}. Sum the counts over all ranks"
        )
