"""From the measurements of parallel code to the likely cause, in sentences; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.tools.verify.evidence import EXPLAINED, Evidence
from titanlite.tools.verify.gradients import explain_gradients, missing_sums
from titanlite.tools.verify.inputs import explain_shards, explain_start
from titanlite.tools.verify.passes import (
    explain_forward,
    explain_loss,
    explain_recomputation,
    outputs_differ,
    wrong_backward,
)
from titanlite.tools.verify.record import Fit, Shares, module_of
from titanlite.tools.verify.shares import describe_parts, sums_of_parts
from titanlite.tools.verify.updates import (
    explain_buffers,
    explain_norm_alone,
    explain_state,
    explain_update,
)
from titanlite.tools.verify.wording import listed, name_factor


@dataclass
class PartEvidence(Evidence):
    """All measurements of parallel code that differs from its reference."""

    shares: Mapping[int, Mapping[str, Fit]] = field(default_factory=dict)
    """Rank -> gradient -> it as a sum of those of the parts, relative to the reference's."""
    weights: Shares = ()
    """Each part's share of the whole mean."""
    parts: Sequence[Sequence[int]] = ()
    """For each distinct part of the batch, the ranks that have it."""
    tied: Sequence[Sequence[str]] = ()
    """Names of one parameter of the reference."""

    def factor(self, value: float) -> str:
        calls = [o.num_calls for trace in self.traces for o in trace.modules.values()]
        return name_factor(value, self.dims, num_microbatches=max(calls, default=1))


def explain_start_of_code(e: PartEvidence) -> Iterator[str]:
    for sentence in explain_start(e):
        yield (
            f"{sentence}. If that is intended, copy_weights=True starts from the weights of the "
            "reference"
        )


def explain_parts(e: PartEvidence) -> Iterator[str]:
    """Gradients that are sums over the ranks' parts of the batch, with wrong coefficients."""
    wrong = e.failed("gradient")
    if not list(missing_sums(e, wrong)):
        parts = [f"rank{'s' * (len(r) > 1)} {listed(r)}" for r in e.parts]
        yield from sums_of_parts(
            e.runs,
            wrong,
            e.shares,
            lambda shares: describe_parts(shares, e.weights, parts),
            "over the ranks' parts of the batch",
        )


def explain_backward(e: PartEvidence) -> Iterator[str]:
    """A module that returns a gradient of its input that is still a sum over an axis."""
    if not e.failed("gradient") or e.failed("start") or outputs_differ(e):
        return
    sums = [trace.summed_backward for trace in e.traces if trace.summed_backward]
    for axis in {axis: None for of_rank in sums for axis in of_rank}:
        found = [of_rank[axis] for of_rank in sums if axis in of_rank]
        is_sum = all(one.difference < EXPLAINED for _, one in found)
        if not is_sum and not any(axis in trace.torn_backward for trace in e.traces):
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


QUESTIONS_OF_CODE = (
    explain_shards,
    explain_start_of_code,
    explain_recomputation,
    explain_forward,
    explain_ties,
    explain_parts,
    explain_loss,
    explain_gradients_of_code,
    explain_norm_alone,
    explain_update,
    explain_state,
    explain_buffers,
)
