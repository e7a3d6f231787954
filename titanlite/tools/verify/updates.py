"""Differences after the gradients: norm, rate, weights, state, buffers, checkpoint; torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from titanlite.tools.verify.dataflow import first_difference, outputs_agree, outputs_differ
from titanlite.tools.verify.economy import Sent
from titanlite.tools.verify.evidence import (
    EXPLAINED,
    WRONG,
    Evidence,
    JobEvidence,
    by_rank,
    pooled,
    ranks_of,
    worst,
)
from titanlite.tools.verify.norms import explain_norm, norms_of_own
from titanlite.tools.verify.record import RankRun
from titanlite.tools.verify.wording import agree, distinct_texts, is_near, joined, listed, times


def explain_norm_alone(e: Evidence) -> Iterator[str]:
    if not e.failed("norm") or e.failed("gradient") or e.failed("start"):
        return
    own, known = e.runs[0].steps[e.step].norm, e.reference[e.step].norm
    norms = {run.rank: run.steps[e.step].norm for run in e.runs}
    if len(set(norms.values())) > 1:
        yield (
            f"ranks have different gradient norms ({by_rank(e, lambda step: step.norm)}): "
            + (norms_of_own(e.runs, e.step) or "sum the squares over all ranks")
        )
    words, where = explain_norm(e.runs, e.step, own), ""
    for one in _sums_of_norm(e):
        places = [e.runs[rank].coordinates for rank in one.ranks]
        axes = [axis for axis in places[0] if len({place[axis] for place in places}) > 1]
        for choice in words.split("; or "):
            if any(f"replicated over {axis} " in choice for axis in axes):
                words, where = choice, f". They are summed in {one.site}"
    ratio = (
        f"the gradient norm is {times(own / known)} as large as on one process, but every "
        "gradient agrees"
    )
    of_steps = {step.norm for step in e.reference[1:]}
    if len(of_steps) > 1 and all(is_near(s.norm, own) for r in e.runs for s in r.steps[1:]):
        yield f"{ratio}: it is {own:g} in every step, whatever the gradients are: look at its root"
    elif words:
        once = "Count each gradient element once, however many ranks hold it"
        yield f"{ratio}: {words}. {once}{where}"
    else:
        yield ratio + e.equals(own / known, form="; {}")


def _sums_of_norm(e: Evidence) -> list[Sent]:
    """The sums of one number over ranks that other code takes between gradients and weights."""
    traffic = e.runs[0].traffic
    after = traffic.sent[traffic.num_of_gradients or len(traffic.sent) :]
    return [one for one in after if one.site and one.what.partition(" ")[0] in ("[]", "[1]")]


def explain_rate(e: Evidence) -> Iterator[str]:
    if e.failed("lr"):
        known = e.reference[e.step].lr
        rates = {run.rank: run.steps[e.step].lr for run in e.runs}
        wrong = {rank: rate for rank, rate in rates.items() if not is_near(rate, known)}
        where = e.where(wrong, rates)
        *rates_shown, right = distinct_texts(*sorted(set(wrong.values())), known)
        shown = listed(rates_shown)
        yield (
            f"the learning rate of step {e.step} is {shown} {where}, but [lr_scheduler] gives "
            f"{right}: the schedule is wrong, or is not advanced once per step"
        )


def explain_update(e: Evidence) -> Iterator[str]:
    wrong = e.failed("weight")
    if not wrong or any(e.failed(kind) for kind in ("start", "gradient", "norm")):
        return
    shown = e.named(wrong, "weight")
    ranks = ranks_of(e, lambda run: worst(run, "weights", e.step, wrong))
    bad = [run for run in e.runs if any(_differs(run, name, e.step) for name in wrong)]
    still = [name for name in wrong if all(_is_unchanged(run, name, e.step) for run in bad)]
    if still:
        who = e.named(still, "weight")
        where = e.where([run.rank for run in bad])
        states = [{n.rpartition(".")[0] for n in r.steps[e.step].state} for r in e.runs]
        counts = {sum(name in of_rank for of_rank in states) for name in still}
        of_step = [run.steps[e.step].gradients for run in bad]
        gradients = [own[name] for own in of_step for name in still if name in own]
        why = (
            "some ranks' optimizers have their state, so they are updated there, and old values "
            "overwrite the update. Look at what the step sends between ranks: each weight must "
            "come from the rank that updates it"
            if counts <= set(range(1, len(e.runs))) and len(bad) == len(e.runs)
            else "what the step updates for them does not arrive here. Look at how it divides the "
            "parameters among the ranks (whose part of them a rank updates), and at what it sends "
            "back"
            if len(bad) == len(e.runs) and not any(states)
            else "the optimizer does not have these tensors, or has others than the model uses. "
            "Build it after what replaces parameters (fully_shard, to, tie)"
            if len(bad) == len(e.runs)
            else "their gradients are zero on one process. Here they are None, or the optimizer "
            "lacks them: it skips their weight decay and momentum. Give them zeros"
            if not any(part.aa for part in gradients)
            else "there the optimizer makes no update in this step, which other ranks make, or "
            "that does not arrive (a parameter whose .data is assigned leaves its bucket)"
        )
        yield f"gradients and their norm agree, but the step leaves {who} unchanged, {where}: {why}"
        return
    yield (
        f"gradients and their norm agree, but {shown} {agree(shown, 'differ')} after the step, "
        f"{e.where(ranks)}. " + (e.describe_update() or _counted_apart(e) or _wrong_update(e))
    )


def _differs(run: RankRun, name: str, step: int) -> bool:
    found = run.steps[step].weights.get(name)
    return found is not None and found.difference > WRONG


def _is_unchanged(run: RankRun, name: str, step: int) -> bool:
    after, before = (run.steps[number].weights.get(name) for number in (step, step - 1))
    return after is None or before is None or after.digest == before.digest


def _counted_apart(e: Evidence) -> str:
    """Whether optimizers have counted other steps than that of one process, all alike; or ""."""
    wrong = [name for name in e.failed("state") if name.endswith(".step")]
    counts = {
        tuple(round(part**0.5) for part in (one.aa, one.bb))
        for run in e.runs
        for name in wrong
        if (one := run.steps[e.step].state.get(name)) is not None
    }
    if len(counts) != 1:
        return ""
    ((own, known),) = counts
    return (
        f"The optimizer has counted {own} steps, on one process {known}, and corrects its moments "
        "by that number: look for what makes a step besides. Reading its state dict before the "
        "first step may make one without gradients (get_optimizer_state_dict does)"
    )


def _wrong_update(e: Evidence) -> str:
    """What is wrong between the gradients and the weights, judged by the optimizer state."""
    moments = [
        part
        for run in e.runs
        for name, part in run.steps[e.step].state.items()
        if name.endswith((".exp_avg", ".momentum_buffer")) and part.bb > 0
    ]
    if not moments:
        return "Either clipping or the optimizer is wrong"
    if not e.failed("state"):
        return (
            "The optimizer state agrees, so the optimizer received the correct gradients. The "
            "update itself is wrong: look at the learning rate, the weight decay and when it runs"
            + _if_all_are_shards(e)
        )
    factor, left = pooled(moments)
    # After step 1 the state also holds the gradients of earlier steps.
    if e.step == 1 and left < EXPLAINED and not is_near(factor, 1.0):
        return (
            f"The optimizer received gradients {factor:.6g} times as large as on one process"
            f"{e.equals(factor)}: clipping is wrong"
        )
    return "The optimizer state differs too: clipping or the optimizer is wrong"


def _if_all_are_shards(e: Evidence) -> str:
    """An update that is not elementwise is another one on a shard."""
    wrong = set(e.failed("weight"))
    placed = {name: axes for run in e.runs for name, axes in run.placements.items()}
    others = placed.keys() - wrong
    if not others or not all("sharded" in placed[name].values() for name in wrong & placed.keys()):
        return ""
    return (
        ", and, since all of these are shards, whether the update needs the whole tensor, as those "
        "of Muon and others that are not elementwise do"
    )


def explain_state(e: Evidence) -> Iterator[str]:
    if (wrong := e.failed("state")) and not any(
        e.failed(kind) for kind in ("start", "gradient", "norm", "weight")
    ):
        keys = sorted({name.rpartition(".")[2] for name in wrong})
        names = {name.rpartition(".")[0] for name in wrong}
        yield (
            f"after step {e.step} all weights agree, but the optimizer state of "
            f"{e.named(names, 'parameter')} differs ({listed(keys)}): the weights "
            "of later steps will differ. Look at how the optimizer updates this state"
        )


def explain_buffers(e: Evidence) -> Iterator[str]:
    # Balancing biases have questions of their own.
    is_job = isinstance(e, JobEvidence)
    wrong = [name for name in e.failed("buffer") if not (is_job and name.endswith(".expert_bias"))]
    if not wrong:
        return
    values = defaultdict(set)
    for run in e.runs:
        for name in wrong:
            if name in run.steps[e.step].buffers:
                values[name].add(run.steps[e.step].buffers[name].digest)
    apart = [name for name in wrong if len(values[name]) > 1]
    right = [
        run.rank
        for run in e.runs
        if all(
            run.steps[e.step].buffers[n].difference <= WRONG
            for n in apart
            if n in run.steps[e.step].buffers
        )
    ]
    agree = f" (those of {listed([f'rank {rank}' for rank in right], 3)} agree)" if right else ""
    how = (
        f"ranks hold different values of {listed(apart, 3)}{agree}"
        if apart
        else "all ranks hold the same wrong values"
    )
    what = (
        "What a buffer keeps of the batch must reach all ranks that read it: reduce statistics, "
        "gather rows, in the order of the batch"
        if apart
        else "Look at how often a step updates them, and from what"
    )
    yield joined(
        f"buffers differ from those of one process after step {e.step}: {listed(wrong, 3)}; {how}",
        _inferred(e, wrong)
        or _counted_again(e, wrong)
        or _added_to_old(e, wrong)
        or _stale(e, apart, right)
        or _kept(e, wrong)
        or joined(what, "" if apart or e.failed("loss") else e.first_wrong_line()),
    )


def _inferred(e: Evidence, wrong: Sequence[str]) -> str:
    """Whether a pipeline runs the modules of these buffers once more than the step; or ""."""
    inferred = {module for trace in e.traces for module in trace.inferred}
    holders = {name.rpartition(".")[0] for name in wrong}
    if not holders or not holders <= inferred:
        return ""
    return (
        "Before its first step a PipelineStage runs its modules once more, on the first "
        "microbatch, to learn the shapes of what it sends (shape inference), and nothing takes "
        "back what that writes into buffers: give the stage input_args and output_args, or put "
        "the buffers back"
    )


def _added_to_old(e: Evidence, wrong: Sequence[str]) -> str:
    """Whether buffers have what they were before the step several times; "" if not."""
    parts = [
        one
        for run in e.runs
        for name in wrong
        if (one := run.steps[e.step].buffers_beside_old.get(name)) is not None
    ]
    factor, left = pooled(parts)
    # Another decay leaves a fraction.
    if left >= EXPLAINED or factor < 0.5 or not is_near(factor, round(factor)):
        return ""
    return (
        f"{'It contains its own value' if len(wrong) == 1 else 'They contain their own values'} of "
        f"before the step {factor + 1:.6g} times{e.equals(factor + 1)}: the step reduces the "
        "running value, which all ranks have alike, instead of what the batch adds to it"
    )


def _stale(e: Evidence, apart: Sequence[str], right: Sequence[int]) -> str:
    """Whether ranks still have what they had before a step that others update rightly; or ""."""
    if not right or not apart:
        return ""
    for run in e.runs:
        now, before = (run.steps[step].buffers for step in (e.step, e.step - 1))
        same = [n in now and n in before and now[n].digest == before[n].digest for n in apart]
        if all(same) == (run.rank in right):
            return ""
    who = listed([f"rank {rank}" for rank in right], 3)
    return (
        f"The other ranks still have the values of step {e.step - 1}: only {who} updates them. "
        "Broadcast what is updated (DDP does before a forward pass, unless broadcast_buffers=False)"
        ", or update it on every rank"
    )


def _kept(e: Evidence, names: Sequence[str]) -> str:
    """Whether the step changes none of these buffers on any rank; "" if it does."""
    for run in e.runs:
        now, before = (run.steps[step].buffers for step in (e.step, e.step - 1))
        for name in names:
            if name not in before or now[name].digest != before[name].digest:
                return ""
    who, it = ("They are", "them") if names[1:] else ("It is", "it")
    return (
        f"{who} as before the step: what it computes for {it} is not kept there (it is assigned to "
        "another name, or to a copy)"
    )


def _counted_again(e: Evidence, wrong: Sequence[str]) -> str:
    """Buffers that count steps, and are a multiple of those on one process; "" if none is."""
    for name in wrong:
        of_ranks = [run.steps[e.step].buffers.get(name) for run in e.runs]
        factor, left = pooled([one for one in of_ranks if one is not None])
        if left < EXPLAINED and factor > 1.5 and is_near(factor, round(factor)):
            same = e.factor(round(factor))
            return (
                f"{name} is {factor:.0f} times that on one process: what updates it runs "
                f"{factor:.0f} times in a step, as in a forward pass that is recomputed"
                + (f", or it is summed though it is complete, since this is {same}" if same else "")
            )
    return ""


def explain_validation(e: Evidence) -> Iterator[str]:
    if e.failed("validation") and not e.failed("weight"):
        own, known = e.runs[0].steps[e.step].validation, e.reference[e.step].validation
        assert own is not None
        assert known is not None
        same = e.factor(own / known) if known else ""
        shown = distinct_texts(own, known)
        apart = len({run.steps[e.step].validation for run in e.runs}) > 1
        start = (
            f"the weights agree, but the validation loss is {shown[0]} instead of {shown[1]}"
            f"{f' (the ratio is {same})' if same else ''}"
        )
        if apart:
            start += f" ({by_rank(e, lambda step: step.validation or 0.0)})"
        for run, trace in zip(e.runs, e.traces, strict=False):
            number = len(trace.sequences)
            first = e.dims.data_rank(run.rank) * number if isinstance(e, JobEvidence) else 0
            if trace.sequences != tuple(range(first, first + number)):
                yield (
                    f"{start}. In its first batch, rank {run.rank} is given sequences "
                    f"{listed(trace.sequences)} of those of one process (-1: none of them) instead "
                    f"of sequences {first} to {first + number - 1}"
                )
                return
        if outputs_differ(e):
            yield from (f"{start}. In its first batch, {one}" for one in first_difference(e))
            return
        seen = ". All module outputs of its first batch agree" if outputs_agree(e) else ""
        yield f"{start}: the evaluation, its data or its average is wrong{seen}"


def explain_metrics(e: Evidence) -> Iterator[str]:
    if e.failed("validation") or e.failed("weight"):
        return
    for name in e.failed("metric"):
        own, known = e.runs[0].steps[e.step].metrics[name], e.reference[e.step].metrics[name]
        shown = distinct_texts(own, known)
        yield (
            f"the weights and the validation loss agree, but the metric {name} is {shown[0]} "
            f"instead of {shown[1]}: its sum or its count depends on how the batch is split. "
            "Return the sum over targets and their number, and no mean"
        )


def explain_reloaded(e: Evidence) -> Iterator[str]:
    if wrong := e.failed("reloaded"):
        tensors = f"{len(wrong)} tensor{'s' * (len(wrong) > 1)} ({listed(sorted(wrong), 3)})"
        yield (
            "everything agrees until the checkpoint is saved. A run that resumes from it has "
            f"different values in {tensors}: what is saved, or how it is sharded on loading, is "
            "wrong under this plan"
        )


def explain_replicas(e: Evidence) -> Iterator[str]:
    splits = [split for split in e.found.splits if split.step == e.step]
    if splits and not any(e.failed(kind) for kind in ("start",)):
        groups = " and ".join(
            f"rank{'s' if len(group) > 1 else ''} {listed(group)}" for group in splits[0].groups
        )
        names = {split.name for split in splits}
        yield (
            f"the replicas of {e.named(names, 'parameter')} differ from step "
            f"{e.step} on ({groups} hold different bits)"
        )
