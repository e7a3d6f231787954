"""From the measurements of parallel code to the likely cause, in sentences; torch-free.

The first stage of a step in which a question finds something gives the conclusion: what differs
later follows from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.dataflow import explain_backward, explain_missing, outputs_agree
from titanlite.tools.verify.diagnose import diagnose
from titanlite.tools.verify.evidence import Evidence
from titanlite.tools.verify.gradients import explain_gradients, missing_sums
from titanlite.tools.verify.inputs import explain_shards, explain_start
from titanlite.tools.verify.passes import explain_forward, explain_loss, explain_recomputation
from titanlite.tools.verify.record import CodeRun, Fit, Shares
from titanlite.tools.verify.shares import describe_parts, sums_of_parts
from titanlite.tools.verify.updates import (
    explain_buffers,
    explain_norm_alone,
    explain_replicas,
    explain_state,
    explain_update,
)
from titanlite.tools.verify.wording import is_near, listed, name_factor


@dataclass
class PartEvidence(Evidence):
    """All measurements of parallel code that differs from its reference."""

    shares: Mapping[int, Mapping[str, Fit]] = field(default_factory=dict)
    """Rank -> gradient -> it as a sum of those of the parts, relative to the reference's."""
    weights: Shares = ()
    """Each part's share of the whole mean."""
    counts: Mapping[str, Shares] = field(default_factory=dict)
    """Tensor of the batch -> the number of its elements in each part."""
    parts: Sequence[tuple[Sequence[int], int | None]] = ()
    """For each part of the batch, the ranks that have it, and the number of the microbatch."""
    tied: Sequence[Sequence[str]] = ()
    """Names of one parameter of the reference."""
    num_microbatches: int = 1

    def factor(self, value: float, names: Iterable[str] = ()) -> str:
        """The degree or count that equals a factor of the gradients `names`, where it can be one.

        A degree can if these are all gradients, or just those that are placed in one way along its
        axis.
        """
        return name_factor(
            value, self._relevant(set(names)), num_microbatches=self.num_microbatches
        )

    def _relevant(self, wrong: set[str]) -> Grid:
        placed = {name: axes for run in self.runs for name, axes in run.placements.items()}
        if not wrong or wrong == placed.keys():
            return self.dims
        degrees = dict.fromkeys(self.dims.degrees, 1)
        for axis, degree in self.dims.degrees.items():
            ways = {placed[name].get(axis) for name in wrong & placed.keys()}
            others = {axes.get(axis) for name, axes in placed.items() if name not in wrong}
            if len(ways) == 1 and not ways & others:
                degrees[axis] = degree
        return Grid(**degrees)


def conclude(e: PartEvidence) -> list[str]:
    """What is wrong, the most likely cause first."""
    for stage in STAGES:
        if any(sentence for ask in stage for sentence in ask(e)):
            # That replicas differ follows from almost anything.
            splits = set(explain_replicas(e))
            return [sentence for sentence in diagnose(e, stage) if sentence not in splits]
    return diagnose(e, ())


def are_local(e: PartEvidence) -> bool:
    """Whether the wrong gradients are each rank's own, though the step keeps the replicas equal.

    Then the optimizer's step exchanges them, or what it makes of them.
    """
    wrong = e.failed("gradient")
    local = {name for found in missing_sums(e, wrong) for name in found.names}
    apart = {split.name for split in e.found.splits if split.step <= e.step}
    return bool(wrong) and local == set(wrong) and not local & apart


def explain_step_of_local_gradients(e: PartEvidence) -> Iterator[str]:
    if are_local(e) and e.failed("weight"):
        yield (
            "each rank's gradients are its own, as if their sum were missing, but after the step "
            "the weights are equal on all ranks: the optimizer's step exchanges them. The weights "
            "are not those of one process, so what the step does with them is wrong: look at the "
            "sign and the scale of the update, and at what it averages"
        )


def explain_start_of_code(e: PartEvidence) -> Iterator[str]:
    for sentence in explain_start(e):
        yield (
            f"{sentence}. If that is intended, copy_weights=True starts from the weights of the "
            "reference"
        )


def explain_cover(e: PartEvidence) -> Iterator[str]:
    """Samples of the batch that no rank reads, or that ranks with different parts read."""
    parts = {run.cells[max(1, e.step) - 1] for run in e.runs if isinstance(run, CodeRun)}
    if None in parts or not parts:
        return
    counts: Counter[int] = Counter()
    num_rows = num_columns = 0
    for part in parts:
        assert part is not None
        num_rows, num_columns, rows, columns = part
        if columns != tuple(range(num_columns)):
            return
        counts.update(rows)
    missed = [row for row in range(num_rows) if not counts[row]]
    often = [row for row in range(num_rows) if counts[row] > 1]
    if missed and often:
        yield (
            f"the ranks read the wrong samples: of the batch of step {max(1, e.step)}, "
            f"{_rows(missed)} {'are' if len(missed) > 1 else 'is'} read by no rank, and "
            f"{_rows(often)} by several. All ranks must take their parts from one order of the "
            "samples: look at the sampler, its seed and its rank"
        )


def _rows(rows: Sequence[int]) -> str:
    words = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}"
    return words + f" and {len(rows) - 4} more" * (len(rows) > 4)


def explain_ties(e: PartEvidence) -> Iterator[str]:
    """Parameters that are one tensor in the reference and several in the parallel code."""
    for names in e.tied:
        several = [n for n in names if any(n in run.placements for run in e.runs)]
        if len(several) > 1 and set(several) & set(e.failed("gradient")):
            yield (
                f"{listed(several)} are one parameter in the reference, but several in the "
                "parallel code: tie them, or add up their gradients"
            )


def explain_parts(e: PartEvidence) -> Iterator[str]:
    """Gradients that are sums over the ranks' parts of the batch, with wrong coefficients."""
    wrong = e.failed("gradient")
    if list(missing_sums(e, wrong)):
        return
    names, kind = [], "the ranks' parts of the batch"
    for ranks, index in e.parts:
        of = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
        names.append(of if index is None else f"microbatch {index} of {of}")
    if any(index is not None for _, index in e.parts):
        kind = "the microbatches"
    yield from sums_of_parts(
        e.runs,
        wrong,
        e.shares,
        lambda shares: describe_parts(shares, e.weights, names, e.counts),
        f"over {kind}",
    )


def explain_logarithm(e: PartEvidence) -> Iterator[str]:
    """A loss that is too large by the logarithm of a degree."""
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    for axis, degree in e.dims.degrees.items():
        if degree > 1 and is_near(abs(own - known), math.log(degree)):
            often = "once too often" if own > known else "too seldom"
            yield (
                f"the loss is {own:.6g} instead of {known:.6g}, which differ by log({degree}), and "
                f"{degree} is the degree of {axis}: inside a logarithm (a logsumexp), a sum over "
                f"{axis} is taken {often}"
            )


def explain_loss_of_code(e: PartEvidence) -> Iterator[str]:
    """The loss, if all that the model returns agrees."""
    if outputs_agree(e) or not any(trace.events for trace in e.traces):
        yield from explain_loss(e)


STAGES: Sequence[Sequence[Callable[[PartEvidence], Iterable[str]]]] = (
    (explain_shards, explain_start_of_code),
    (explain_cover,),
    (explain_missing,),
    (explain_recomputation,),
    (explain_forward,),
    (explain_ties,),
    (explain_step_of_local_gradients,),
    (explain_parts,),
    (explain_logarithm,),
    (explain_loss_of_code,),
    (explain_backward,),
    (explain_gradients,),
    (explain_norm_alone,),
    (explain_update,),
    (explain_state, explain_buffers),
)
