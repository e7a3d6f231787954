"""What follows the gradients: norm, rate, weights, optimizer state, buffers; torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from titanlite.verify.evidence import EXPLAINED, Evidence, pooled, ranks_of, worst
from titanlite.verify.norms import explain_norm
from titanlite.verify.words import agree, is_near, listed, name_parameters, name_ranks


def explain_norm_alone(e: Evidence) -> Iterator[str]:
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


def explain_rate(e: Evidence) -> Iterator[str]:
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


def explain_update(e: Evidence) -> Iterator[str]:
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


def explain_state(e: Evidence) -> Iterator[str]:
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


def explain_buffers(e: Evidence) -> Iterator[str]:
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


def explain_validation(e: Evidence) -> Iterator[str]:
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


def explain_reloaded(e: Evidence) -> Iterator[str]:
    if wrong := e.failed("reloaded"):
        tensors = f"{len(wrong)} tensor{'s' * (len(wrong) > 1)} ({listed(sorted(wrong), 3)})"
        yield (
            "everything agrees until the checkpoint is saved. A run that resumes from it has other "
            f"values in {tensors}: what is saved, or how it is cut when it is loaded, is wrong "
            "under this plan"
        )


def explain_replicas(e: Evidence) -> Iterator[str]:
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
