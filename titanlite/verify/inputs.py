"""What a step starts from: weights, data, positions, the number of targets; torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titanlite.mesh.parallel_dims import axes_where
from titanlite.verify.compare import same_shards
from titanlite.verify.evidence import Evidence, ranks_of, worst
from titanlite.verify.words import listed, name_parameters, name_ranks


def explain_start(e: Evidence) -> Iterator[str]:
    wrong = e.failed("start")
    if not wrong:
        return
    shown = name_parameters(wrong, e.runs, "parameter")
    if alike := sorted(set(same_shards(e.runs)) & set(wrong)):
        yield (
            f"shards start alike: {name_parameters(alike, e.runs, 'parameter')} start with the "
            "same values in shards that hold different parts. Each rank has drawn its shard as if "
            "it were the first; draw each parameter at its full shape, from a generator seeded by "
            "its name, and cut that"
        )
        return
    if any(split.step == 0 for split in e.splits):
        yield (
            f"ranks start with different values of what they should hold alike: {shown}. Their "
            "random states differ; seed each parameter by its name, not by its rank"
        )
        return
    ranks = ranks_of(e, lambda run: worst(run, "weights", 0, wrong))
    yield f"{shown} start with other values than on one process, {name_ranks(ranks, e.runs, ranks)}"


def explain_data(e: Evidence) -> Iterator[str]:
    step = max(1, e.step)
    per_rank = e.job.global_batch_size // e.dims.dp
    wrong: dict[int, tuple[int, ...]] = {}
    read: dict[tuple[int, ...], tuple[int, ...]] = {}
    for run in e.runs:
        place = tuple(run.coordinates[axis] for axis in axes_where(batch="samples"))
        read[place] = run.steps[step].sequences
        first = e.dims.data_rank(run.rank) * per_rank
        if read[place] != tuple(range(first, first + per_rank)):
            wrong[run.rank] = read[place]
    counts = Counter(number for own in read.values() for number in own if number != -1)
    batch = range(e.job.global_batch_size)
    if all(counts[number] == 1 for number in batch):
        # Dealt out in another order, perhaps, and the same batch in all.
        wrong = {}
    elif not wrong:
        often = [number for number in batch if counts[number] > 1]
        never = [number for number in batch if not counts[number]]
        yield (
            f"the data depend on the plan: at step {step} the data-parallel ranks read sequences "
            f"{listed(often)} of the batch more than once and {listed(never)} not at all. Their "
            "places among the data-parallel ranks are counted wrongly"
        )
    if wrong:
        rank, sequences = next(iter(wrong.items()))
        first = e.dims.data_rank(rank) * per_rank
        strange = sum(one == -1 for one in sequences)
        got = (
            f"{strange} sequences that are not in the batch of one process"
            if strange
            else f"sequences {listed(sequences)} of it"
        )
        yield (
            f"the data depend on the plan: at step {step} rank {rank} read {got}, in place of "
            f"sequences {first} to {first + per_rank - 1}, and so "
            f"{name_ranks(wrong, e.runs, range(len(e.runs)))}. Which sample comes when must not "
            "depend on the data-parallel degree: let the sampler count over all ranks together"
        )
    moved = [run.rank for run in e.runs if not run.steps[step].positions_agree]
    if moved:
        layout = e.job.config.parallelism.context_parallel_load_balancer
        yield (
            "positions are wrong under context parallelism: the model is told other positions "
            f"than those of the tokens a rank holds in the {layout} layout, "
            f"{name_ranks(moved, e.runs, range(len(e.runs)))}. Cut the positions as the tokens are "
            "cut; an offset of their own is wrong"
        )
    shifted = [run.rank for run in e.runs if not run.steps[step].targets_agree]
    if shifted and not wrong:
        yield (
            "targets are not those of the tokens, "
            f"{name_ranks(shifted, e.runs, range(len(e.runs)))}: make the targets before the "
            "sequence is cut"
        )


def explain_stage_positions(e: Evidence) -> Iterator[str]:
    """Stages of a pipeline that take positions and do not get those of their tokens."""
    blind = {t.rank: t.blind_stages for t in e.traces if t.blind_stages}
    if not blind:
        return
    stages = sorted({stage for of_rank in blind.values() for stage in of_rank})
    which = next(words for of_rank in blind.values() for words in of_rank.values())
    who = f"stage{'s' * (len(stages) > 1)} {listed(stages)} of the pipeline"
    because = (
        ": without them a stage counts its tokens from 0, and under context parallelism a rank "
        "holds others"
        if which == "none" and e.dims.cp_enabled
        else ""
    )
    yield (
        f"{who if e.dims.pp_enabled else 'the model'} takes `positions` and is given {which}, "
        f"{name_ranks(blind, e.runs, range(len(e.runs)))}{because}. Give every stage the positions "
        "of its tokens, cut as the tokens are"
    )


def explain_count(e: Evidence) -> Iterator[str]:
    """One wrong number of targets; of different ones `explain_counts` tells later."""
    step = max(1, e.step)
    known = e.reference[step].num_targets
    counts = {run.steps[step].num_targets for run in e.runs}
    if len(counts) == 1 and counts != {known} and not e.failed("start"):
        ratio = counts.pop() / known
        same = e.factor(ratio)
        because = f", which is {same}" if same else ""
        yield (
            f"the plan divides by {ratio:.6g} times as many targets as the step has{because}: "
            "targets are counted on several ranks that hold the same, or not on all"
        )


def explain_counts(e: Evidence) -> Iterator[str]:
    step = max(1, e.step)
    counts = {run.steps[step].num_targets for run in e.runs}
    if len(counts) > 1:
        yield (
            f"ranks count different numbers of targets in a step ({listed(sorted(counts))}), and "
            f"there are {e.reference[step].num_targets}"
        )
