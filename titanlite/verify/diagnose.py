"""From the pattern of differences to the likeliest cause, in sentences; torch-free.

Each function below asks one question of what the ranks measured, and says what it sees, if
anything. They are asked in the order in which a step computes: what is wrong first is likeliest the
cause of what is wrong later. No function knows of any one bug; they compare the numbers at
hand with what each way of going wrong (a sum too many, a share missing, a rank left out) makes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from titanlite.mesh.parallel_dims import axes_where
from titanlite.verify.compare import KINDS, same_shards
from titanlite.verify.evidence import EXPLAINED, Evidence, pooled, ranks_of, worst
from titanlite.verify.gradients import explain_gradients, explain_shares
from titanlite.verify.norms import explain_norm
from titanlite.verify.record import ModuleOutput, module_of
from titanlite.verify.words import agree, is_near, listed, name_parameters, name_ranks

# How far the gradient of an output may be from the reference's, in float64.
WRONG_GRADIENT = 1e-9


def diagnose(evidence: Evidence) -> list[str]:
    """What is wrong, the likeliest cause first."""
    found: list[str] = []
    for ask in QUESTIONS:
        found += [sentence for sentence in ask(evidence) if sentence not in found]
    if not found:
        found = [_unexplained(evidence)]
    found += _growth(evidence)
    return found


def _start(e: Evidence) -> Iterator[str]:
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


def _data(e: Evidence) -> Iterator[str]:
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


def _stage_positions(e: Evidence) -> Iterator[str]:
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


def _count(e: Evidence) -> Iterator[str]:
    """One wrong number of targets; where ranks have different ones, `_counts` says so later."""
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


def _counts(e: Evidence) -> Iterator[str]:
    step = max(1, e.step)
    counts = {run.steps[step].num_targets for run in e.runs}
    if len(counts) > 1:
        yield (
            f"ranks count different numbers of targets in a step ({listed(sorted(counts))}), and "
            f"there are {e.reference[step].num_targets}"
        )


def _cured(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        return
    details = [*_pending_inputs(e), *_recomputed(e)] or list(explain_gradients(e))[:1]
    because = f": {'; '.join(details)}" if details else ""
    yield f"with {' and also with '.join(e.cured_by)} the plan agrees{because}"


def _pending_inputs(e: Evidence) -> list[str]:
    names = list(dict.fromkeys(name for trace in e.traces for name in trace.pending_inputs))
    if not names:
        return []
    return [
        f"the compiled module {names[0]} is given the result of a collective that is still "
        "running (an AsyncCollectiveTensor), which the compiler differentiates wrongly; wait for "
        "it before the compiled module"
    ]


def _recomputed(e: Evidence) -> list[str]:
    largest: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            largest[name] = max(largest[name], output.recomputed)
    wrong = [name for name in e.forward_order if largest.get(name, 0.0) > 1e-9]
    if not wrong:
        return []
    return [
        f"activation checkpointing recomputes other values than the forward pass had, first in "
        f"{wrong[0]} (by {largest[wrong[0]]:.1e}): what it saves and what it computes again must "
        "be chosen alike both times, for instance by counts of their own for the forward pass and "
        "the recomputation"
    ]


def _recomputation(e: Evidence) -> Iterator[str]:
    if not e.cured_by:
        yield from _recomputed(e)


def _float8(e: Evidence) -> Iterator[str]:
    """The first float8 layer that scales its input otherwise than one process does."""
    known = {} if e.reference_trace is None else e.reference_trace.scaled
    for name in filter(known.__contains__, e.forward_order):
        is_rowwise, amax = known[name]
        seen = {t.rank: t.scaled[name] for t in e.traces if name in t.scaled}
        if others := [rank for rank, (rowwise, _) in seen.items() if rowwise != is_rowwise]:
            ways = ("a scale a row", "one scale")
            own, right = ways if not is_rowwise else ways[::-1]
            yield (
                f"{name} scales its input by {own}, and its recipe "
                f"{e.job.config.quantize.linear.float8.recipe} has {right}, "
                f"{name_ranks(others, e.runs, seen)}: what multiplies in its place has another "
                "recipe; let it call the layer's own product"
            )
            return
        largest = max((value for _, value in seen.values()), default=amax)
        wrong = [rank for rank, (_, value) in seen.items() if not is_near(value, amax)]
        if wrong and is_near(largest, amax):
            yield (
                f"{name} is the first float8 layer whose scales differ, "
                f"{name_ranks(wrong, e.runs, seen)}: its amax there is that of the rank's own part "
                "alone, and the largest of all ranks is right. Reduce an amax (MAX) over every "
                "axis that cuts what it is of: tokens over data and context parallelism, features "
                "over tp"
            )
        if wrong:
            return


def _forward(e: Evidence) -> Iterator[str]:
    wrong: dict[str, dict[int, ModuleOutput]] = defaultdict(dict)
    holders: dict[str, list[int]] = defaultdict(list)
    for trace in e.traces:
        for name, output in trace.modules.items():
            holders[name].append(trace.rank)
            if output.wrong_calls:
                wrong[name][trace.rank] = output
    first = next((name for name in e.forward_order if name in wrong), None)
    if first is None:
        return
    outputs = wrong[first]
    name = first or "the model's logits"
    parts = [
        f"{name} is the first module in forward order whose output differs, "
        f"{name_ranks(outputs, e.runs, holders[first])}; all before it agree"
    ]
    if e.reference_trace is not None and e.reference_trace.num_left_out:
        parts[0] += f", of those that were kept ({e.reference_trace.num_left_out} were too large)"
    one = next(iter(outputs.values()))
    if not all(math.isfinite(output.agreement.aa) for output in outputs.values()):
        parts.append("it is not finite there")
    if len(one.wrong_calls) < one.num_calls:
        calls = listed(one.wrong_calls)
        parts.append(f"of {one.num_calls} microbatches only {calls}")
    sums = [trace.summed_output for trace in e.traces if trace.rank in outputs]
    for axis in {axis for of_rank in sums for axis in of_rank}:
        if all(axis in s and s[axis].difference < EXPLAINED for s in sums):
            parts.append(
                f"summed over {axis} it is right: the module puts out a sum that is still to be "
                f"made. Its output layout must reduce it over {axis} (Replicate() or Shard(...))"
            )
    if shape := next((output.shape for output in outputs.values() if output.shape), ""):
        parts.append(f"its shape on a rank is {shape}: its output layout is another one")
    if places := {output.elsewhere for output in outputs.values() if output.elsewhere}:
        parts.append(
            f"it is what belongs to {listed(sorted(places))}: the position or offset that it is "
            "given, or counts by itself, is not that of the rank's tokens"
        )
    factor, left = pooled([output.agreement for output in outputs.values()])
    if left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        parts.append(f"it is {factor:.6g} times as large{f', which is {same}' if same else ''}")
    module = module_of(first)
    style = next((t.styles[module] for t in e.traces if module in t.styles), "")
    if style:
        parts.append(f"its entry in the tensor-parallel plan is {style}")
    elif e.dims.cp_enabled and len(outputs) < len(holders[first]):
        parts.append(
            "other ranks of cp have it right, so it does not see all keys and values of the "
            "others, or sees some twice"
        )
    yield ". ".join(part[:1].upper() + part[1:] if i else part for i, part in enumerate(parts))


def _problems(e: Evidence) -> Iterator[str]:
    yield from dict.fromkeys(problem for run in e.runs for problem in run.problems)


def _rate(e: Evidence) -> Iterator[str]:
    if e.failed("lr"):
        known = e.reference[e.step].lr
        rates = {run.rank: run.steps[e.step].lr for run in e.runs}
        wrong = {rank: rate for rank, rate in rates.items() if not is_near(rate, known)}
        where = name_ranks(wrong, e.runs, rates)
        shown = listed(f"{rate:.6g}" for rate in sorted(set(wrong.values())))
        yield (
            f"the learning rate of step {e.step} is {shown} {where}, "
            f"and [lr_scheduler] gives {known:.6g}: the schedule, or how often it is stepped, is "
            "wrong"
        )


def _loss(e: Evidence) -> Iterator[str]:
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    values = {run.steps[e.step].loss for run in e.runs}
    if strange := [value for value in values if not math.isfinite(value)]:
        yield f"the loss is {strange[0]}"
        return
    if len(values) > 1:
        yield f"ranks report different losses ({len(values)} of them): a sum over ranks is missing"
    gradients_agree = not e.failed("gradient")
    if is_near(own, known):
        return
    ratio = own / known if known else float("nan")
    same = e.factor(ratio)
    if same:
        shown = (
            ". Gradients agree, so it is the shown loss alone that is wrong"
            if gradients_agree
            else ""
        )
        way = "divided by it once too often" if ratio < 1 else "summed over it once too often"
        yield f"the loss is {ratio:.6g} times as large, which is {same}: {way}{shown}"
    elif gradients_agree:
        yield (
            f"the loss is {ratio:.6g} times as large though all gradients agree: the shown loss "
            "alone is wrong"
        )
    elif _outputs_agree(e):
        yield (
            f"the output of every module agrees, the model's logits with them, and the loss is "
            f"{ratio:.6g} times as large: the loss function, its targets, or what it is divided by "
            "is wrong"
        )


def _outputs_agree(e: Evidence) -> bool:
    """Whether outputs were looked at, and all of them agree."""
    outputs = [output for trace in e.traces for output in trace.modules.values()]
    return bool(outputs) and not any(output.wrong_calls for output in outputs)


def _norm(e: Evidence) -> Iterator[str]:
    if not e.failed("norm") or e.failed("gradient") or e.failed("start"):
        return
    own, known = e.runs[0].steps[e.step].norm, e.reference[e.step].norm
    norms = {run.steps[e.step].norm for run in e.runs}
    if len(norms) > 1:
        yield f"ranks have different gradient norms ({listed(sorted(norms), 3)})"
    words = explain_norm(e.runs, e.step, own)
    ratio = f"the gradient norm is {own / known:.6g} times as large though every gradient agrees"
    same = e.factor(own / known)
    if words:
        yield f"{ratio}: {words}. Count each element of each gradient once, whatever holds it"
    elif same:
        yield f"{ratio}; the factor is {same}"
    else:
        yield ratio


def _update(e: Evidence) -> Iterator[str]:
    wrong = e.failed("weight")
    if not wrong or any(e.failed(kind) for kind in ("start", "gradient", "norm")):
        return
    shown = name_parameters(wrong, e.runs, "weight")
    ranks = ranks_of(e, lambda run: worst(run, "weights", e.step, wrong))
    yield (
        f"gradients and their norm agree and {shown} {agree(shown, 'differ')} after the step, "
        f"{name_ranks(ranks, e.runs, range(len(e.runs)))}: {_wrong_update(e)}"
    )


def _wrong_update(e: Evidence) -> str:
    """What is wrong between the gradients and the weights, from what the optimizer keeps."""
    moments = [
        part
        for run in e.runs
        for name, part in run.steps[e.step].state.items()
        if name.endswith((".exp_avg", ".momentum_buffer")) and part.bb > 0
    ]
    if not moments:
        return "clipping or the optimizer is wrong"
    if not e.failed("state"):
        return (
            "what the optimizer keeps of each gradient agrees, so it was given the right ones; the "
            "update itself is wrong: the learning rate, the weight decay, or when it is made"
        )
    factor, left = pooled(moments)
    # Gradients of earlier steps are in it too, but for the first.
    if e.step == 1 and left < EXPLAINED and not is_near(factor, 1.0):
        same = e.factor(factor)
        return (
            f"the optimizer was given gradients {factor:.6g} times as large"
            f"{f', which is {same}' if same else ''}: clipping is wrong"
        )
    return (
        "what the optimizer keeps of the gradients differs too: clipping or the optimizer is wrong"
    )


def _state(e: Evidence) -> Iterator[str]:
    if (wrong := e.failed("state")) and not any(
        e.failed(kind) for kind in ("start", "gradient", "norm", "weight")
    ):
        keys = sorted({name.rpartition(".")[2] for name in wrong})
        names = {name.rpartition(".")[0] for name in wrong}
        yield (
            f"after step {e.step} all weights agree and what the optimizer keeps of "
            f"{name_parameters(names, e.runs, 'parameter')} does not ({listed(keys)}): the weights "
            "of later steps will differ"
        )


def _buffers(e: Evidence) -> Iterator[str]:
    wrong = e.failed("buffer")
    if not wrong:
        return
    values = defaultdict(set)
    for run in e.runs:
        for name in wrong:
            if name in run.steps[e.step].buffers:
                values[name].add(run.steps[e.step].buffers[name].digest)
    apart = [name for name in wrong if len(values[name]) > 1]
    how = (
        f"ranks have different values of {listed(apart, 3)}"
        if apart
        else "all ranks have the same wrong values"
    )
    yield (
        f"buffers differ from those of one process after step {e.step}: {listed(wrong, 3)}; {how}. "
        "What a buffer gathers of a batch has to be reduced over the ranks that read it"
    )


def _validation(e: Evidence) -> Iterator[str]:
    if e.failed("validation") and not e.failed("weight"):
        own, known = e.runs[0].steps[e.step].validation, e.reference[e.step].validation
        assert own is not None
        assert known is not None
        same = e.factor(own / known) if known else ""
        yield (
            f"the weights agree and the validation loss is {own:.6g}, not {known:.6g}"
            f"{f'; the ratio is {same}' if same else ''}: evaluation, its data or how it is "
            "averaged is wrong"
        )


def _replicas(e: Evidence) -> Iterator[str]:
    splits = [split for split in e.splits if split.step == e.step]
    if splits and not any(e.failed(kind) for kind in ("start",)):
        groups = " and ".join(
            f"rank{'s' if len(group) > 1 else ''} {listed(group)}" for group in splits[0].groups
        )
        names = {split.name for split in splits}
        yield (
            f"from step {e.step} on {name_parameters(names, e.runs, 'parameter')} "
            f"{'is' if len(names) == 1 else 'are'} not the same on ranks that should be alike in "
            f"that ({groups} have different bits)"
        )


def _growth(e: Evidence) -> list[str]:
    """Whether it came at once or grew, where it did not come with the first step."""
    if e.step <= 1 or not e.failures:
        return []
    first = min((f for f in e.failures if f.step == e.step), key=lambda f: KINDS.index(f.kind))
    key = first.kind, first.name
    series = [of_step.get(key, 0.0) for of_step in e.differences[: e.step + 1]]
    before = [value for value in series[1:-1] if value > 0.0]
    if before and first.difference < 1e3 * before[-1] and before[-1] > 3 * before[0]:
        return [
            f"it grows, from {before[0]:.1e} at step 1 to {first.difference:.1e} at step {e.step}: "
            "rounding that is amplified, more than a wrong sum"
        ]
    last = before[-1] if before else 0.0
    return [
        f"it begins at step {e.step}, with a jump from {last:.1e} to {first.difference:.1e}: "
        "steps before it agree, so look at what is done only from then on"
    ]


def _wrong_backward(e: Evidence) -> str:
    """The modules between which the backward pass goes wrong, where outputs' gradients tell."""
    if not _outputs_agree(e) or e.failed("loss"):
        return ""
    worst: dict[str, float] = defaultdict(float)
    for trace in e.traces:
        for name, output in trace.modules.items():
            if output.gradient is not None:
                worst[name] = max(worst[name], output.gradient.difference)
    order = [name for name in e.forward_order if name in worst]
    wrong = [index for index, name in enumerate(order) if worst[name] > WRONG_GRADIENT]
    if not wrong or wrong[-1] == len(order) - 1:
        return ""
    last, after = order[wrong[-1]], order[wrong[-1] + 1]
    return (
        f"in the backward pass, the gradient of the output of {last} is the first that differs, "
        f"and that of {after or 'the logits'}, right after it in the forward pass, still agrees: "
        f"what {after or 'the model'} hands back to its inputs is wrong"
    )


def _unexplained(e: Evidence) -> str:
    wrong = set(e.failed("gradient"))
    if wrong:
        order = e.parameter_order
        last = max(wrong, key=lambda name: order.get(name, -1))
        ranks = ranks_of(e, lambda run: worst(run, "gradients", e.step, sorted(wrong)))
        shown = name_parameters(wrong, e.runs, "gradient")
        if place := _wrong_backward(e):
            return f"{shown} {agree(shown, 'are')} wrong and every output agrees: {place}"
        seen = "the output of every module that was looked at agrees" if _outputs_agree(e) else ""
        loss = "the loss differs" if e.failed("loss") else "the loss agrees"
        measured = f"{seen}, {loss}" if seen else loss
        where = (
            "something in the backward pass, or done to gradients after it"
            if seen and not e.failed("loss")
            else "the loss, or something that was not looked at"
        )
        return (
            f"unexplained: {measured}, and {shown} {agree(shown, 'do')} not, "
            f"{name_ranks(ranks, e.runs, range(len(e.runs)))}, first {last} in backward order, by "
            f"no factor, no sum over an axis and no share of the batch. What is left is {where}"
        )
    return "unexplained: no question has an answer; the table shows what differs"


def _reloaded(e: Evidence) -> Iterator[str]:
    if wrong := e.failed("reloaded"):
        yield (
            f"all agrees until it is saved, and {len(wrong)} tensors differ in a run that goes on "
            f"from the checkpoint ({listed(sorted(wrong), 3)}): what is saved, or how it is cut "
            "when it is loaded, is wrong under this plan"
        )


QUESTIONS = (
    _start,
    _problems,
    _data,
    _stage_positions,
    _count,
    _cured,
    _recomputation,
    _float8,
    _forward,
    explain_shares,
    _loss,
    explain_gradients,
    _counts,
    _norm,
    _rate,
    _update,
    _state,
    _buffers,
    _validation,
    _reloaded,
    _replicas,
)
