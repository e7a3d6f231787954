"""From the pattern of differences to the likely cause, in sentences; torch-free.

Each question tests the ranks' measurements for one kind of error and yields what it finds. They
run in the order of the computation in a step (inputs.py, dataflow.py, passes.py, gradients.py,
updates.py): the first error most likely causes the later ones. No question knows a particular bug.
Each compares the numbers with the pattern of one kind of error: an extra sum, a missing part, a
skipped rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from titanlite.tools.verify import dataflow, experts, gradients, inputs, passes, updates
from titanlite.tools.verify.differences import KINDS
from titanlite.tools.verify.evidence import Evidence
from titanlite.tools.verify.wording import Explained, agree

E = TypeVar("E", bound=Evidence)


def diagnose(evidence: E, questions: Iterable[Callable[[E], Iterable[str]]]) -> list[str]:
    """What the questions find, the most likely cause first."""
    found: list[str] = []
    for ask in questions:
        found += [sentence for sentence in ask(evidence) if sentence not in found]
        if found and ask in CONCLUSIVE:
            break
    found = _by_coverage(evidence, found)
    # Replicas differ as a result of most errors.
    splits = list(updates.explain_replicas(evidence))
    if not found and (evidence.found.failures or not splits):
        found = [passes.unexplained(evidence)]
    found += splits
    found += _growth(evidence)
    return found


def _by_coverage(e: Evidence, found: list[str]) -> list[str]:
    """The sentences about gradients, those that explain most first, and what they leave open."""
    places = [index for index, one in enumerate(found) if isinstance(one, Explained)]
    own = [one for one in found if isinstance(one, Explained)]
    kept, explained = [], set[str]()
    for one in sorted(own, key=lambda one: -len(one.names)):
        if one.names - explained:
            kept.append(one)
            explained |= one.names
    rest = [found[index] for index in range(len(found)) if index not in places]
    if not kept:
        return rest
    first = places[0]
    left = sorted(set(e.failed("gradient")) - explained) if first == 0 else []
    more: list[str] = [*kept]
    if len(left) > len(explained) or (left and passes.wrong_backward(e)):
        is_most = len(left) > len(explained) and not kept[0].is_exact
        more.insert(0 if is_most else len(kept), passes.unexplained(e, left))
    elif left:
        shown = e.named(left)
        more[0] += f". This does not explain {shown}, which {agree(shown, 'differ')} too"
    return [*rest[:first], *more, *rest[first:]]


def _growth(e: Evidence) -> list[str]:
    """Whether the difference grew or jumped, if it begins after the first step."""
    if e.step <= 1 or not e.found.failures:
        return []
    first = min(
        (f for f in e.found.failures if f.step == e.step), key=lambda f: KINDS.index(f.kind)
    )
    if first.kind in ("validation", "metric", "reloaded"):
        # Compared in few steps only, or after the last.
        return []
    key = first.kind, first.name
    series = [of_step.get(key, 0.0) for of_step in e.found.differences[: e.step + 1]]
    before = [value for value in series[1:-1] if value > 0.0]
    if before and first.difference < 1e3 * before[-1] and before[-1] > 3 * before[0]:
        return [
            f"the difference grows from {before[0]:.1e} at step 1 to {first.difference:.1e} at "
            f"step {e.step}: amplified rounding error is more likely than a wrong sum"
        ]
    last = before[-1] if before else 0.0
    return [
        f"the difference begins at step {e.step}, with a jump from {last:.1e} to "
        f"{first.difference:.1e}: earlier steps agree, so look at what happens only from this step "
        "on"
    ]


CONCLUSIVE: set[Callable[..., Iterable[str]]] = {inputs.explain_start, inputs.explain_data}
"""With other weights or other data, everything after them differs too."""

QUESTIONS_OF_JOB = (
    inputs.explain_shards,
    inputs.explain_start,
    inputs.explain_data,
    inputs.explain_stage_positions,
    inputs.explain_count,
    passes.explain_cures,
    passes.explain_recomputation,
    passes.explain_float8,
    experts.explain_experts,
    experts.explain_auxiliary_loss,
    dataflow.explain_missing,
    passes.explain_forward,
    gradients.explain_cells,
    passes.explain_loss,
    experts.explain_expert_gradients,
    gradients.explain_gradients,
    experts.explain_loads,
    inputs.explain_counts,
    updates.explain_norm_alone,
    updates.explain_rate,
    updates.explain_update,
    updates.explain_state,
    updates.explain_buffers,
    updates.explain_validation,
    updates.explain_metrics,
    updates.explain_reloaded,
)
