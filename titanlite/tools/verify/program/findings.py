"""From the measurements of parallel code to the likely cause, in sentences; torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.tools.verify.diagnose import answers
from titanlite.tools.verify.differences import same_shards
from titanlite.tools.verify.evidence import EXPLAINED, Evidence
from titanlite.tools.verify.gradients import explain_gradients, missing_sums
from titanlite.tools.verify.inputs import explain_start
from titanlite.tools.verify.passes import (
    explain_forward,
    explain_loss,
    explain_recomputation,
    unexplained,
    wrong_backward,
)
from titanlite.tools.verify.record import Agreement, module_of
from titanlite.tools.verify.updates import (
    explain_buffers,
    explain_norm_alone,
    explain_replicas,
    explain_state,
    explain_update,
)
from titanlite.tools.verify.wording import (
    be_a_sum,
    is_near,
    listed,
    name_factor,
    name_parameters,
    name_ranks,
)

# How close a part's coefficient must be to a number to equal it; the largest residual of a fit.
NEAR, LEFT = 1e-5, 1e-6

Fit = tuple[tuple[float, ...], float]


@dataclass
class PartEvidence(Evidence):
    """All measurements of parallel code that differs from its reference."""

    shares: Mapping[int, Mapping[str, Fit]] = field(default_factory=dict)
    """Rank -> gradient -> the coefficient of each part's own gradient in it, and the residual."""
    expected_shares: Mapping[str, Fit] = field(default_factory=dict)
    """The same for the reference's gradients."""
    parts: Sequence[Sequence[int]] = ()
    """For each distinct part of the batch, the ranks that have it."""
    backward: Mapping[int, Mapping[str, tuple[str, Agreement]]] = field(default_factory=dict)
    """Rank -> axis -> the first wrong gradient of an output, in backward order, and its sum."""
    torn: Sequence[str] = ()
    """Axes along which ranks hold the same output but different gradients of it."""
    is_split: bool = False
    """Whether ranks have different parts of the batch."""
    tied: Sequence[Sequence[str]] = ()
    """Names of one parameter of the reference."""

    def factor(self, value: float) -> str:
        calls = [o.num_calls for trace in self.traces for o in trace.modules.values()]
        return name_factor(value, self.dims, num_microbatches=max(calls, default=1))


def diagnose(evidence: PartEvidence) -> list[str]:
    """What is wrong with parallel code, the most likely cause first."""
    found = answers(evidence, QUESTIONS)
    return found or [unexplained(evidence)]


def explain_shards(e: PartEvidence) -> Iterator[str]:
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
            f"ranks hold each other's shards of {name_parameters(swapped, e.runs, 'parameter')}: "
            "each starting value is right, on the wrong rank. Look at the index by which a rank "
            "chooses its shard, and at the order of the ranks in the group"
        )


def explain_start_of_code(e: PartEvidence) -> Iterator[str]:
    for sentence in explain_start(e):
        yield (
            f"{sentence}. If that is intended, copy_weights=True starts from the weights of the "
            "reference"
        )


def explain_shares(e: PartEvidence) -> Iterator[str]:
    """Gradients that are sums over the ranks' parts of the batch, with wrong coefficients."""
    if list(missing_sums(e, e.failed("gradient"))):
        return
    groups: dict[tuple[tuple[float, ...], tuple[float, ...]], dict[str, list[int]]] = {}
    for rank, of_rank in e.shares.items():
        for name in e.failed("gradient"):
            if name not in of_rank or name not in e.expected_shares:
                continue
            (own, left), (known, known_left) = of_rank[name], e.expected_shares[name]
            if left > LEFT or known_left > LEFT:
                continue
            key = next((k for k in groups if _same(k[0], own) and _same(k[1], known)), (own, known))
            groups.setdefault(key, defaultdict(list))[name].append(rank)
    for (own, known), ranks_of in groups.items():
        words = _describe(e, own, known)
        if not words:
            continue
        who = name_parameters(list(ranks_of), e.runs, "gradient")
        ranks = sorted({rank for ranks in ranks_of.values() for rank in ranks})
        yield (
            f"{who} {be_a_sum(who)} over the ranks' parts of the batch with wrong coefficients, "
            f"{name_ranks(ranks, e.runs, range(len(e.runs)))}: {words}"
        )


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) < 10 * NEAR * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))


def _describe(e: PartEvidence, own: Sequence[float], known: Sequence[float]) -> str:
    if _same(own, known) or not all(known):
        return ""
    ratios = [a / b for a, b in zip(own, known, strict=True)]
    if all(is_near(ratio, ratios[0], NEAR) for ratio in ratios):
        # The same factor for every part is explain_gradients' subject.
        return ""
    of_parts = [f"rank{'s' * (len(r) > 1)} {listed(r)}" for r in e.parts]
    if all(is_near(value, own[0], NEAR) for value in own) and not is_near(own[0], 0.0, NEAR):
        shown = [f"{k / sum(known):.4g} ({who})" for k, who in zip(known, of_parts, strict=True)]
        return (
            f"a mean of means. Each part counts {own[0] / sum(known):.4g}, but the parts' shares "
            f"of the whole mean are {listed(shown, 4)}, since they have different numbers of "
            "targets. Divide the sum of all losses by the number of targets in the whole batch"
        )
    missing = [who for r, who in zip(ratios, of_parts, strict=True) if abs(r) < NEAR]
    rest = [r for r in ratios if abs(r) >= NEAR]
    if missing and all(is_near(r, rest[0], NEAR) for r in rest):
        scaled = (
            "" if is_near(rest[0], 1.0, NEAR) else f", and the others count {rest[0]:.4g} times"
        )
        return f"the part of {listed(missing)} is missing{scaled}"
    odd = [f"{r:.4g} times ({who})" for r, who in zip(ratios, of_parts, strict=True)]
    return f"the parts count {listed(odd, 4)}"


def explain_backward(e: PartEvidence) -> Iterator[str]:
    """A module that returns a gradient of its input that is still a sum over an axis."""
    if not e.failed("gradient") or e.failed("start") or _outputs_differ(e):
        return
    sums = [of_rank for of_rank in e.backward.values() if of_rank]
    for axis in {axis: None for of_rank in sums for axis in of_rank}:
        found = [of_rank[axis] for of_rank in sums if axis in of_rank]
        is_sum = all(one.difference < EXPLAINED for _, one in found)
        if not is_sum and axis not in e.torn:
            continue
        call = found[0][0]
        order = list(e.forward_order)
        after = next(
            (c for c in order[order.index(call) + 1 :] if not _is_inside(call, module_of(c))), ""
        )
        reader = f"{after}, next in forward order," if after else "the module that reads it"
        how = (
            f"it is correct after a sum over {axis}"
            if is_sum
            else f"the ranks of {axis}, which hold the same output, have different gradients of it"
        )
        yield (
            f"in the backward pass, the gradient of the output of {call or 'the model'} is the "
            f"first that differs, and {how}: {reader} returns a gradient of its input that is "
            f"still Partial over {axis}. All-reduce it over {axis} in that module's backward pass"
        )
        return
    if place := wrong_backward(e):
        yield place


def _is_inside(call: str, module: str) -> bool:
    return module == "" or module_of(call).startswith(f"{module}.")


def _outputs_differ(e: Evidence) -> bool:
    return any(o.wrong_calls for trace in e.traces for o in trace.modules.values())


def explain_loss_of_code(e: PartEvidence) -> Iterator[str]:
    """The loss; only of ranks with different parts does a sum give the loss of the batch."""
    for sentence in explain_loss(e):
        if e.is_split or "different losses" not in sentence:
            yield sentence
        elif not _outputs_differ(e):
            yield "ranks with the same batch have different losses: look at the loss function"


def explain_gradients_of_code(e: PartEvidence) -> Iterator[str]:
    explained = list(explain_backward(e))
    yield from explained
    # A wrong gradient of an output makes those of earlier parameters wrong.
    for sentence in explain_gradients(e):
        if not (explained and "are wrong as a result" in sentence):
            yield sentence


def explain_ties(e: PartEvidence) -> Iterator[str]:
    """Parameters that are one tensor in the reference and several in the parallel code."""
    for names in e.tied:
        several = [n for n in names if any(n in run.placements for run in e.runs)]
        if len(several) > 1 and set(several) & set(e.failed("gradient")):
            yield (
                f"{listed(several)} are one parameter in the reference, but several in the "
                "parallel code: tie them, or add up their gradients"
            )


QUESTIONS = (
    explain_shards,
    explain_start_of_code,
    explain_recomputation,
    explain_forward,
    explain_ties,
    explain_shares,
    explain_loss_of_code,
    explain_gradients_of_code,
    explain_norm_alone,
    explain_update,
    explain_state,
    explain_buffers,
    explain_replicas,
)
