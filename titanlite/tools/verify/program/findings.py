"""From the measurements of parallel code to the likely cause, in sentences; torch-free.

The first stage of a step in which a question finds something gives the conclusion: what differs
later follows from it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.dataflow import (
    describe_event,
    explain_backward,
    explain_missing,
    first_wrong,
    one_sided,
    outputs_agree,
)
from titanlite.tools.verify.diagnose import diagnose
from titanlite.tools.verify.evidence import EXPLAINED, PADDING, Evidence, pooled, ranks_of, worst
from titanlite.tools.verify.gradients import (
    explain_absent,
    explain_factors,
    explain_gradients,
    missing_sums,
)
from titanlite.tools.verify.inputs import explain_shards, explain_start
from titanlite.tools.verify.passes import explain_forward, explain_loss, explain_recomputation
from titanlite.tools.verify.record import LEFT, CodeRun, PartFits, Update, UseFit, WrongRows
from titanlite.tools.verify.shares import NEAR, describe_parts, sums_of_parts
from titanlite.tools.verify.updates import (
    explain_buffers,
    explain_norm_alone,
    explain_replicas,
    explain_state,
    explain_update,
)
from titanlite.tools.verify.wording import (
    Explained,
    agree,
    be,
    is_near,
    joined,
    listed,
    name_factor,
)

LEAST_COUNT = 8


@dataclass
class PartEvidence(Evidence):
    """All measurements of parallel code that differs from its reference."""

    fits: PartFits = field(default_factory=PartFits)
    """The wrong gradients as sums of those of the parts."""
    parts: Sequence[tuple[Sequence[int], int | None]] = ()
    """For each part of the batch, the ranks that have it, and the number of the microbatch."""
    tied: Sequence[Sequence[str]] = ()
    """Names of one parameter of the reference."""
    num_microbatches: int = 1
    first_microbatches: int = 1
    """Those of step 1."""
    changed: Sequence[str] = ()
    """The weights that the reference itself changes before its forward pass."""
    accumulated: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> how often a backward pass adds to its gradient in the reference."""
    trained: Collection[str] = ()
    """The parameters to which any of the reference's steps adds."""
    uses: Mapping[int, Mapping[str, UseFit]] = field(default_factory=dict)
    """Rank -> gradient -> it as a sum of those of the single uses of its parameter."""
    alone: str = ""
    """The parts of the batch whose losses, each alone, have the wrong loss as their mean."""
    updates: Mapping[int, Mapping[str, Update]] = field(default_factory=dict)
    """Rank -> wrong weight -> what the step did to it."""

    @property
    def names_of_parts(self) -> list[str]:
        """The parts of the batch, in words."""
        names = []
        for ranks, index in self.parts:
            of = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
            names.append(of if index is None else f"microbatch {index} of {of}")
        return names

    def factor(self, value: float, names: Iterable[str] = ()) -> str:
        """The degree or count that equals a factor of the gradients `names`, where it can be one.

        A degree can if these are all gradients, or just those that are placed in one way along its
        axis.
        """
        relevant, number = self._relevant(set(names)), self.num_microbatches
        found = name_factor(value, relevant, num_microbatches=number)
        if 0 < value < 1 and " or " in found:
            # A mean is right over ranks that have different rows.
            own = {a: n for a, n in relevant.degrees.items() if a not in self.axes_of_batch}
            found = name_factor(value, Grid(**own), num_microbatches=number) or found
        for name, counts in self.fits.counts.items():
            total = sum(counts)
            # A small count may equal it by chance.
            if not found and total > LEAST_COUNT and is_near(value, total):
                return f"how many elements of {name} in the batch are not negative"
        return found

    @functools.cached_property
    def axes_of_batch(self) -> list[str]:
        """The axes along which ranks are given different rows."""
        runs = [run for run in self.runs if isinstance(run, CodeRun)]
        return axes_of_batch(runs, self.dims, max(1, self.step))

    def _relevant(self, wrong: set[str]) -> Grid:
        placed = {name: axes for run in self.runs for name, axes in run.placements.items()}
        if not wrong or wrong == placed.keys():
            return self.dims
        # Along an axis of pipeline stages a parameter has no placement, but a number of copies.
        copies = Counter(name for run in self.runs for name in run.placements)
        degrees = dict.fromkeys(self.dims.degrees, 1)
        for axis, degree in self.dims.degrees.items():
            way = {name: axes.get(axis, copies[name]) for name, axes in placed.items()}
            ways = {way[name] for name in wrong & placed.keys()}
            others = {own for name, own in way.items() if name not in wrong}
            if len(ways) == 1 and not ways & others:
                degrees[axis] = degree
        return Grid(**degrees)

    def describe_update(self) -> str:
        """What the optimizer's step does to the wrong weights, in a sentence; "" if unknown."""
        for line, axes in (trace.own_norm for trace in self.watched if trace.own_norm):
            return (
                f"{line} takes the norm of the gradients that each rank has, alone, so clipping "
                "scales each rank's by a factor of its own. Add up the squares (of copies once) "
                f"over {axes} before the norm is used"
            )
        return (
            self._describe_weights()
            or self._describe_options()
            or self._describe_step()
            or self._describe_cut()
        )

    def _describe_cut(self) -> str:
        """Whether just the weights that are cut along one dimension are wrong; "" if not."""
        wrong = self.failed("weight")
        for run in (run for run in self.runs if isinstance(run, CodeRun)):
            ways = {run.cut_dims.get(name, ()) for name in wrong}
            others = {cut for name, cut in run.cut_dims.items() if name not in wrong}
            placed = [run.placements.get(name, {}).items() for name in wrong]
            shared = set.intersection(*({a for a, how in of if how == "sharded"} for of in placed))
            if len(ways) > 1 or not others or not shared:
                return ""
            (cut,) = ways
            if len(cut) != 1 or any(cut[0] in other for other in others):
                return ""
        return (
            f"These are just the weights that are cut along dimension {cut[0]} over "
            f"{listed(sorted(shared))}: the optimizer takes a mean, a norm or the like along that "
            "dimension from each rank's part alone. Reduce it over the ranks"
        )

    def _describe_options(self) -> str:
        """What the optimizer has otherwise for just the wrong weights; "" for nothing."""
        runs = [run for run in self.runs if isinstance(run, CodeRun)]
        apart = {(run.rank, name): words for run in runs for name, words in run.options.items()}
        wrong = {(rank, name) for rank, of_rank in self.updates.items() for name in of_rank}
        # Weights of zero do not decay.
        known = {words for key, words in apart.items() if key in wrong}
        is_decay = all(word.startswith("weight_decay") for words in known for word in words)
        if len(known) != 1 or not wrong <= apart.keys() or not (is_decay or apart.keys() == wrong):
            return ""
        (words,) = known
        return (
            f"The optimizer has {listed(words)} on one process for "
            f"{'them' if len({name for _, name in wrong}) > 1 else 'it'}: look at how parameters "
            "are chosen for its groups (a name, a mark, a shape)"
        )

    def _describe_step(self) -> str:
        """The first line of the optimizer's step with another result, if it says why."""
        lines = [line for trace in self.watched for line in trace.step_lines]
        known = (line for line in lines if line.source or line.numbers)
        found = next(map(self.describe_line, known), "")
        return f"Of the optimizer's step {found}" if found else ""

    def _describe_weights(self) -> str:
        wrong = [one for of_rank in self.updates.values() for one in of_rank.values()]
        if not wrong:
            return ""
        if all(one.is_alone for one in wrong):
            return (
                "Each rank's new values are those that the step gives if its shard is taken for "
                "the whole tensor: this optimizer needs the whole tensor, so gather it before"
            )
        if all(one.is_unchanged for one in wrong):
            names = {name for of_rank in self.updates.values() for name in of_rank}
            there = any(names & run.steps[self.step].gradients.keys() for run in self.runs)
            moved = (
                "The step of one process leaves them as they are, as it does without a gradient, "
                "but the ranks' step moves them"
            )
            zeros = (
                ". A gradient of zeros is one, too: weight decay and old momentum move a weight "
                "with it. Leave it at None"
            )
            old = ": by a gradient of an earlier step that is still there, of them or of a copy?"
            return moved + (zeros if there else old)
        if all(one.num_kept for one in wrong):
            return self._describe_kept()
        if all(one.num_zero for one in wrong):
            number = max(sum(one.num_zero for one in own.values()) for own in self.updates.values())
            return (
                f"{number} elements differ, which are zero on one process, and all others agree: "
                "what sets them to zero after the step, as pruning does, is without effect on the "
                "ranks"
            )
        factor, left = pooled([one.decay for one in wrong])
        # Small differences leave little beside the weights, whatever they are.
        is_multiple = all(p.ab**2 > (1 - EXPLAINED) * p.aa * p.bb for p in (w.decay for w in wrong))
        if left < EXPLAINED and factor and is_multiple:
            return (
                f"They differ by {factor:.4g} times the weights before the step: the weight decay "
                "of these parameters is not that on one process. "
                f"{self._describe_options() or 'Look at their parameter groups'}"
            )
        factor, left = pooled([one.fit for one in wrong])
        if left >= EXPLAINED:
            scales = self._describe_scales()
            line = self._describe_step() if scales else ""
            return joined(scales, line) or self._describe_shares(wrong)
        if is_near(factor, 1.0):
            return ""
        same = self._same(factor)
        rates, now = [one.lr for one in self.reference], self.step
        runs = (run for run in self.runs if isinstance(run, CodeRun) and len(run.rates) >= now)
        own = {run.rates[now - 1] for run in runs}
        for step, rate in enumerate(rates[1:], 1):
            # A rate that equals a later one by chance is no schedule that is ahead.
            is_known = step < now or not own or any(is_near(one, rate) for one in own)
            if rate and step != now and is_known and is_near(rate, factor * rates[now]):
                why = "set the rate of another optimizer's groups"
                if step > now:
                    why = (
                        "go on more than once for each step of the optimizer, as once for each rank"
                    )
                return (
                    f"They change {factor:.6g} times as much as on one process: the learning rate "
                    f"is that of step {step}, {rate:g}, and not {rates[now]:g}. Does the "
                    f"schedule {why}?"
                )
        if (known := rates[now]) and len(own) == 1 and is_near(rate := own.pop(), factor * known):
            return (
                f"The learning rate of step {now} is {rate:g}, on one process {known:g}. "
                "Look at the schedule: over how many steps of the optimizer is it laid out, and "
                "how often does it go on?"
            )
        return (
            f"The change of these weights is {factor:.6g} times that on one process"
            f"{f' ({factor:.6g} is {same})' if same else ''}: look at the "
            f"{'sign' if factor < 0 else 'scale'} of the update, and at the learning rate"
        )

    def _describe_kept(self) -> str:
        """Why weights are as they were before the step."""
        held = [(run.rank, run.steps[self.step].weights) for run in self.runs]
        names = {name for of_rank in self.updates.values() for name in of_rank}
        has = {
            name: [r for r, own in held if name in own and name not in self.updates.get(r, ())]
            for name in names
        }
        if all(has.values()):
            first = min(names)
            return (
                "The step leaves them as they were on these ranks, and is right on others, as that "
                f"of {first} on rank {has[first][0]}: what one rank updates, the others do not "
                "get. Broadcast it, or gather it, after the step"
            )
        number = max(sum(one.num_kept for one in own.values()) for own in self.updates.values())
        return (
            f"The step leaves {number} elements as they were, and all others agree: no rank "
            "updates these. Look at how the parameters are divided among the ranks"
        )

    def _describe_scales(self) -> str:
        """How large the updates are, beside weight decay; "" unless that explains all of them."""
        groups: dict[tuple[float, int | None], dict[str, float]] = defaultdict(dict)
        for of_rank in self.updates.values():
            for name, one in of_rank.items():
                if one.scale is None or is_near(one.scale, 1.0, 1e-3):
                    return ""
                groups[round(one.scale, 4), one.adam_step][name] = one.scale
        shown = []
        for (scale, adam_step), scales in groups.items():
            same = self._same(next(iter(scales.values())))
            why = f" ({scale:g} is {same})" * bool(same)
            if adam_step is not None:
                why = f", as by Adam's bias correction of step {adam_step}: see how often the "
                why += "optimizer counts a step"
            elif "root" in same:
                why += ": see whether a scale is taken from the size of a rank's shard"
            who = listed(sorted(scales), 3)
            shown.append(f"the update of {who} is {scale:g} times that on one process{why}")
        return f"Beside weight decay, {'; '.join(shown)}"

    def _describe_shares(self, wrong: Sequence[Update]) -> str:
        """By how much each rank's share of the update is scaled; "" if they are no such shares."""
        scales = {round(scale, 3) for one in wrong for scale in one.scales}
        few = scales != {1.0} and len(scales) <= self.dims.world_size
        if not few or not all(one.scales for one in wrong):
            return ""
        return (
            f"Runs of their rows change {listed([f'{s:g}' for s in sorted(scales)], 8)} times as "
            "much as on one process: each rank scales the share that it updates by a number of its "
            "own, such as the norm of the gradients of that share. Reduce it over the ranks first"
        )

    def _same(self, scale: float) -> str:
        """The degree, or the square root of one, that a scale of updates equals."""
        square = self.factor(scale * scale)
        return self.factor(scale) or f"the square root of {square}" * bool(square)


def axes_of_batch(runs: Iterable[CodeRun], grid: Grid, step: int) -> list[str]:
    """The axes along which ranks are given different rows."""
    parts: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for run in runs:
        for axis in grid.axes_in_use:
            rest = tuple(sorted({**run.coordinates, axis: 0}.items()))
            parts[axis, rest].add(run.parts[step - 1])
    differ = {key[0] for key, own in parts.items() if len(own) > 1}
    return [axis for axis in grid.axes_in_use if axis in differ]


def conclude(e: PartEvidence) -> list[str]:
    """What is wrong, the most likely cause first."""
    for stage in STAGES:
        if any(sentence for ask in stage for sentence in ask(e)):
            # That replicas differ follows from almost anything.
            splits = set(explain_replicas(e))
            found = [sentence for sentence in diagnose(e, stage) if sentence not in splits]
            more = _cleared(e) if {explain_parts, explain_uses} & {*stage} else _of_reductions(e)
            return [joined(found[0], more), *found[1:]] if found else []
    found = diagnose(e, ())
    return [joined(found[0], _of_reductions(e)), *found[1:]] if found else []


def _cleared(e: PartEvidence) -> str:
    """The line that clears the wrong gradients in the middle of the step; or ""."""
    wrong = set(e.failed("gradient"))
    lines = (line for t in e.watched for line, names in t.cleared.items() if names & wrong)
    fits = [one for of_rank in e.fits.fits.values() for n, one in of_rank.items() if n in wrong]
    is_more = all(min(shares) > 1 - NEAR and left < LEFT for shares, left in fits) and bool(fits)
    found = "" if is_more else next(lines, "")
    return (
        f"{found} clears gradients in the middle of the step, after a backward pass has added to "
        "them: what that has added is lost"
    ) * bool(found)


def _of_reductions(e: PartEvidence) -> str:
    """What a missing sum comes from: plain tensors among FSDP2's shards, or the largest all-reduce
    whose result nothing reads; what else a hook of DDP may do; or "".
    """
    wrong, runs = e.failed("gradient"), [run for run in e.runs if isinstance(run, CodeRun)]
    lacking = {name for found in missing_sums(e, wrong) for name in found.names}
    plain = {name for run in runs for name in run.beside_shards}
    if lacking and plain and lacking <= plain:
        return (
            "FSDP2 reduces the other parameters' gradients, and not these: it takes the parameters "
            "that a module has when fully_shard is called for it, but for ignored_params"
        )
    sent = [run.traffic.sent[index] for run in e.runs for index in run.traffic.unread]
    sums = sorted((one.num_bytes, one.site) for one in sent if one.kind == "all_reduce")
    return (
        f"Nothing reads the result of the all-reduce in {sums[-1][1]} before it is gone: does it "
        "sum a copy (contiguous(), a cast), and not what is used?"
        if sums
        else ""
    )


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
        change = e.describe_update()
        yield (
            "each rank's gradients are its own, as if their sum were missing, but after the step "
            "the weights are equal on all ranks: the optimizer's step exchanges them. The weights "
            "are not those of one process, so what the step does with them is wrong"
            + (f". {change}" if change else ": look at what it averages, and by what it scales")
            + (f". {drawn}" if (drawn := _drawn(e)) else "")
        )


def _drawn(e: PartEvidence) -> str:
    """Whether the optimizer's step draws random numbers, on which ranks; "" if not."""
    lines = {trace.rank: trace.drawn for trace in e.watched if trace.drawn}
    if not lines:
        return ""
    return (
        f"The step draws random numbers, in {listed(next(iter(lines.values())), 2)}, "
        f"{e.where(lines)}: where ranks add up what has such numbers in it, they are there once "
        "for each rank. Add them on one rank, or after the sum"
    )


def explain_kept(e: PartEvidence) -> Iterator[str]:
    """What the backward pass computes again, or reads of the forward pass, with other values."""
    apart = {trace.rank: trace.recomputed_apart for trace in e.watched if trace.recomputed_apart}
    if apart and e.failed("gradient") and not first_wrong(e):
        yield (
            f"the backward pass computes {next(iter(apart.values()))[0]} again, and with other "
            f"values than in the forward pass, {e.where(apart)}: what it is given is not what the "
            "forward pass had. Look at what is kept for it (only a part, another mask, a buffer "
            "that has changed since)"
        )
    written = {trace.rank: trace.overwritten for trace in e.watched if trace.overwritten}
    # That of what a module receives or returns is known with its name.
    is_known = any(one.is_overwritten for trace in e.traces for one in trace.events.values())
    if written and e.failed("gradient") and not first_wrong(e) and not is_known:
        yield (
            f"what {next(iter(written.values()))[0]} saves for the backward pass is overwritten "
            f"before that reads it, {e.where(written)}. Autograd does not see it if a collective "
            "writes there (dist.all_reduce changes its input), or an alias. Give that a copy"
        )


def explain_lost_contents(e: PartEvidence) -> Iterator[str]:
    """Memory that is filled again before all that is in it has been read."""
    wrong = e.failed("gradient")
    summed = {name for found in missing_sums(e, wrong) for name in found.names}
    # Gradients that lack a sum are not in what is overwritten.
    if not (e.failed("loss") or wrong) or summed == {*wrong} != set():
        return
    of_ranks = {run.rank: run.traffic for run in e.runs}
    if lost := {rank: one for rank, one in of_ranks.items() if one.lost}:
        source, writer = next(iter(lost.values())).lost[0]
        yield (
            f"what {source} brings is overwritten by {writer} before anything reads it, "
            f"{e.where(lost)}: the buffer is filled again too early. Read it before, or take "
            "another buffer"
        )
    elif changed := {rank: one for rank, one in of_ranks.items() if one.changed}:
        reader, writer = next(iter(changed.values())).changed[0]
        yield (
            f"{reader} reads memory that {writer} has overwritten since it was read before, "
            f"{e.where(changed)}: others share the buffer, and have filled it again. Keep a copy, "
            "or fill it once more before"
        )


def explain_start_of_code(e: PartEvidence) -> Iterator[str]:
    shuffled = {run.rank: run.shuffled for run in e.runs if isinstance(run, CodeRun)}
    if names := {name for of_rank in shuffled.values() for name in of_rank}:
        who, where = e.named(names, "parameter"), [r for r, own in shuffled.items() if own]
        yield (
            f"{who} {agree(who, 'start')} with the elements of the reference's in another order, "
            f"{e.where(where)}: as where a tensor that is not contiguous, such as a transposed "
            "one, is sent or filled in the order of its memory. Call contiguous() before that"
        )
        return
    order = {name for run in e.runs if isinstance(run, CodeRun) for name in run.in_other_order}
    for sentence in explain_start(e):
        if order:
            yield (
                f"{sentence.partition('. Look')[0]}. {listed(sorted(order), 3)} "
                f"{'have' if len(order) > 1 else 'has'} rows of the reference's weight, but not "
                "the chunk that was expected. If another cut is intended, as for a fused matrix, "
                "say it: shard=, a function from a name to a function that cuts the whole tensor"
            )
            continue
        yield (
            f"{sentence}. If that is intended, copy_weights=True starts from the weights of the "
            "reference"
        )


def explain_cover(e: PartEvidence) -> Iterator[str]:
    """Samples of the batch that no rank reads, or that ranks with different parts read."""
    parts = {run.cells[max(1, e.step) - 1] for run in e.runs if isinstance(run, CodeRun)}
    if None in parts or not parts:
        return
    if len(parts) == 1 and (given := next(iter(parts))) and given[2] == (*range(given[0]),):
        # Ranks that are given the whole batch take their part in the step: the model shows which.
        # Pipelines in both directions have other rows in each of a rank's stages.
        own = [[o.rows for o in t.events.values() if o.num_rows == given[0]] for t in e.traces]
        if len(own) == len(e.runs) and all(own):
            read = ((*every[-1], *sorted({*chain(*every)} - {*every[-1]})) for every in own)
            parts = {(given[0], given[1], one, given[3]) for one in read}
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
    of = f"of the batch of step {max(1, e.step)}"
    if missed and often:
        yield (
            f"the ranks read the wrong samples: {of}, "
            f"{_rows(missed)} {'are' if len(missed) > 1 else 'is'} read by no rank, and "
            f"{_rows(often)} by several. All ranks must take their parts from one order of the "
            "samples: look at the sampler, its seed and its rank"
        )
    elif missed and any(map(e.failed, ("loss", "gradient"))):
        yield (
            f"the ranks do not read all samples: {of}, {_rows(missed)} "
            f"{'are' if len(missed) > 1 else 'is'} read by no rank"
            + f". All ranks read {_rows(sorted(counts))}" * (len(e.runs) > 1 == len(parts))
            + ". Look at how the batch is divided among the ranks"
        )
    elif often and len(often) < num_rows and any(map(e.failed, ("loss", "gradient"))):
        yield (
            f"the ranks read some samples more than once: {of}, {_rows(often)} "
            f"{'are' if len(often) > 1 else 'is'} read by several, the others by one. Samples that "
            "fill up a part must not count in the loss: look at the sampler"
        )


def _rows(rows: Sequence[int]) -> str:
    words = f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}"
    return words + f" and {len(rows) - 4} more" * (len(rows) > 4)


def explain_changed(e: PartEvidence) -> Iterator[str]:
    """Weights that change between the optimizer's step and the next forward pass."""
    seen = {
        run.rank: run.changed[e.step]
        for run in e.runs
        if isinstance(run, CodeRun) and run.changed.get(e.step)
    }
    if not seen or e.changed or not any(map(e.failed, ("loss", "gradient", "weight"))):
        return
    names = {name for of_rank in seen.values() for name in of_rank}
    who = e.named(names, "weight")
    before = f"step {e.step - 1} left them" if e.step > 1 else "they were at the start"
    yield (
        f"{who} {be(who)} changed before the forward pass of step {e.step}, "
        f"{e.where(seen)}: not as {before}. Look for code that "
        "replaces weights (averaged weights, loading, a cast) and does not restore them"
    )


def explain_untrained(e: PartEvidence) -> Iterator[str]:
    """Weights without a gradient, which the code itself sets."""
    wrong = [name for name in e.failed("weight") if name not in e.trained]
    wrong = [n for n in wrong if all(n not in run.steps[e.step].gradients for run in e.runs)]
    if not wrong or not e.accumulated:
        return
    ranks = ranks_of(e, lambda run: worst(run, "weights", e.step, wrong))
    who = e.named(wrong, "weight")
    own = [one.fit for of_rank in e.updates.values() for n, one in of_rank.items() if n in wrong]
    factor, left = pooled(own)
    how = ", and at who runs it"
    held = [
        run.steps[now].weights.get(n)
        for n in wrong
        for run in e.runs
        for now in (e.step - 1, e.step)
        if run.rank in ranks
    ]
    if all(a and b and a.digest == b.digest for a, b in zip(held[::2], held[1::2], strict=True)):
        how = ". They are as they were before the step"
        how += (
            ": it leaves them out. Does it find them by name? Wrappers change names "
            "(_checkpoint_wrapped_module, module, _orig_mod)"
            if len(ranks) == len(e.runs)
            else " there, and other ranks set them: it does not run there, or is given nothing, "
            "such as a state dict that one rank alone has (strict=False accepts an empty one)"
        )
    if left < EXPLAINED and 1 < factor <= e.num_microbatches:
        how = f". They change {factor:.6g} times as much as on one process, as averages do that "
        how += f"are updated after each of {e.num_microbatches} microbatches. Do it once a step"
    yield (
        f"{who}, which nothing trains, {agree(who, 'differ')} after step {e.step}, {e.where(ranks)}"
        f": look at the code that sets them (averaged weights, centers, a teacher){how}"
    )


def explain_frozen(e: PartEvidence) -> Iterator[str]:
    """Gradients of weights that have none on one process."""
    wrong = [name for name in e.failed("gradient") if name not in e.accumulated]
    found = [run.steps[e.step].gradients.get(name) for run in e.runs for name in wrong]
    # In the reference's there is nothing to compare.
    if not e.accumulated or not wrong or any(one and (one.bb or not one.digest) for one in found):
        return
    who = e.named(wrong, "weight")
    yield Explained(
        f"{who} {agree(who, 'have')} a gradient, but on one process none: "
        f"{'it is' if be(who) == 'is' else 'they are'} frozen there (requires_grad is False), or "
        "not used. Keep requires_grad when weights are cut, copied or wrapped",
        wrong,
    )


def explain_order(e: PartEvidence) -> Iterator[str]:
    """Calls of modules in an order of each rank's own."""
    wrong = e.failed("gradient")
    orders = {trace.rank: trace.order for trace in e.traces}
    if wrong and len({*orders.values()}) > 1 and not first_wrong(e):
        rank, order = next((rank, own) for rank, own in orders.items() if own)
        yield Explained(
            f"rank {rank} calls modules in the order {listed(order, 8)} of the calls of one process"
            " (counted from 0), and other ranks in another order: what ranks exchange in each call "
            "or in its backward pass, as where gradients are reduced, then belongs to different "
            "calls. Call them in one order on all ranks",
            wrong,
        )


def explain_mixed(e: PartEvidence) -> Iterator[str]:
    """Gradients that contain those of other parameters."""
    wrong = e.failed("gradient")
    if names := [name for name in wrong if name in e.fits.mixed]:
        first, others = names[0], listed(e.fits.mixed[names[0]], 3)
        many = f", and likewise {len(names) - 1} more" * (len(names) > 1)
        # What smaller ones, such as biases, are sums of does not follow from so few elements.
        runs = (run for run in e.runs if isinstance(run, CodeRun))
        sizes = {name: number for run in runs for name, number in run.sizes.items()}
        least = min(sizes.get(name, 0) for name in names)
        names += [n for n in wrong if n not in names and sizes.get(n, least) < least]
        yield Explained(
            f"the gradient of {first} contains that of {others}{many}: ranks add up gradients of "
            "different parameters. Look at which a bucket or stage has on each rank, and in which "
            "order: one whose gradient is None must not be left out",
            names,
        )


def explain_ties(e: PartEvidence) -> Iterator[str]:
    """Parameters that are one tensor in the reference and several in the parallel code."""
    for names in e.tied:
        several = [n for n in names if any(n in run.placements for run in e.runs)]
        if len(several) > 1 and set(several) & set(e.failed("gradient")):
            yield (
                f"{listed(several)} are one parameter in the reference, but several in the "
                "parallel code: tie them, or add up their gradients"
            )


def explain_lost(e: PartEvidence) -> Iterator[str]:
    """Gradients that are missing, or zero, on every rank, though the backward pass is whole."""
    wrong = e.failed("gradient")
    parts = {n: [p for r in e.runs if (p := r.steps[e.step].gradients.get(n))] for n in wrong}
    if any(own and not any(one.digest for one in own) for own in parts.values()):
        yield from explain_absent(e)
    zero = [n for n, own in parts.items() if own and all(p.bb and not p.aa for p in own)]
    yield from explain_factors(e, zero)


def explain_passes(e: PartEvidence) -> Iterator[str]:
    """Backward passes that DDP does not reduce."""
    runs = [run for run in e.runs if isinstance(run, CodeRun) and run.is_ddp]
    wrong = e.failed("gradient")
    often = {
        (t.num_passes, min(t.accumulated.get(name, 0) for name in wrong)) for t in e.traces if wrong
    }
    if len(runs) < len(e.runs) or len(often) > 1:
        return
    for forward, backward in often:
        if 0 < forward < backward:
            after = "one forward pass" if forward == 1 else f"{forward} forward passes"
            yield Explained(
                f"after {after} of DistributedDataParallel there are {backward} backward passes, "
                "and it reduces gradients only once for each forward pass: what the later ones "
                "add stays each rank's own. Add up the losses, and go back once",
                wrong,
            )


def explain_hooks(e: PartEvidence) -> Iterator[str]:
    """Hooks of parameters that FSDP2 has sharded."""
    wrong = set(e.failed("gradient"))
    hooked = {n for run in e.runs if isinstance(run, CodeRun) for n in run.hooked}
    if wrong and wrong == hooked:
        who = e.named(wrong)
        yield Explained(
            f"{who} {be(who)} those of the parameters that have hooks (register_hook), which never "
            "run: FSDP2 itself gives its shards their gradients. Use "
            "register_post_accumulate_grad_hook, or change gradients after the backward pass",
            wrong,
        )


def explain_buckets(e: PartEvidence) -> Iterator[str]:
    """A communication hook that keeps something for buckets which DDP makes anew after step 1."""
    wrong = e.failed("gradient")
    hooks = {run.comm_hook for run in e.runs if isinstance(run, CodeRun)}
    if not wrong or e.step != 2 or e.failed("loss") or list(missing_sums(e, wrong)):
        return
    for name, line in hooks:
        if line:
            who = e.named(wrong)
            yield Explained(
                f"{who} {be(who)} wrong from step 2 on, after DDP's communication hook {name}: "
                f"{line} asks for a bucket's index. After the first step DDP puts gradients into "
                "other buckets, in the order in which they came, so that what is kept for an index "
                "is then of other parameters. Keep it for the bucket's parameters",
                wrong,
            )


def explain_unreached(e: PartEvidence) -> Iterator[str]:
    """Calls of a module to which no gradient comes back."""
    known = {trace.rank: trace.unreached for trace in e.traces if trace.unreached}
    order = [event for event in e.events if any(event in own for own in known.values())]
    if not order or not e.failed("gradient"):
        return
    ranks = [rank for rank, own in known.items() if order[-1] in own]
    missing, number = known[ranks[0]][order[-1]]
    yield Explained(
        f"no gradient comes back to {describe_event(order[-1])} in call{'s' * (len(missing) > 1)} "
        f"{listed(missing)} of {number} (counted from 0), {e.where(ranks)}, unlike on one process, "
        "though it is computed with gradients: look for what skips the backward pass of these "
        "calls, or detaches what they return",
        e.failed("gradient"),
    )


def explain_parts(e: PartEvidence) -> Iterator[str]:
    """Gradients that are sums over the ranks' parts of the batch, with wrong coefficients."""
    wrong, own = e.failed("gradient"), _of_own_rank(e)
    if list(missing_sums(e, wrong)) and not own:
        return
    order = [index for _, index in e.parts if index is not None]
    names, kind = e.names_of_parts, "the microbatches" if order else "the ranks' parts of the batch"
    if len(own) == 1 and 0 < len(kept := next(iter(own))) < len(set(order)):
        some = [f"microbatch{'es' * (len(k) > 1)} {listed(k)}" for k in (kept, {*order} - kept)]
        yield e.explained(
            wrong,
            f"reduced over the ranks for {some[1]} alone: those of {some[0]} (of "
            f"{len(set(order))}, counted from 0) stay each rank's own. The backward pass of the "
            "last one must reduce what all of them have accumulated. DDP decides that in the "
            "forward pass, by no_sync or require_backward_grad_sync",
        )
        return
    if axes := _not_reduced_over(e, wrong):
        (rank, of_rank), over = next(iter(e.fits.fits.items())), " and ".join(axes)
        shares, _ = next(iter(of_rank.values()))
        shown = {w: f"{n:.4g} times" for w, n in zip(names, shares, strict=True) if abs(n) > NEAR}
        how = f", and these {max(shares):.4g} times{e.equals(max(shares))}"
        how *= not is_near(max(shares), 1.0, NEAR)
        if len({*shown.values()}) > 1:
            how = f", and on rank {rank} these {listed([f'{n} ({w})' for w, n in shown.items()])}"
        yield e.explained(
            wrong,
            f"not reduced over {over}: on each rank they have only parts of the batch that ranks "
            f"with the same coordinate on {over} read{how}. Reduce them over {over}, too",
        )
        return
    yield from sums_of_parts(
        e.runs,
        wrong,
        e.fits.fits,
        lambda shares: describe_parts(
            *(shares, e.fits.weights, names, e.fits.counts),
            of_loss=bool(e.failed("loss")),
            order=order,
        ),
        f"over {kind}",
    )


def _not_reduced_over(e: PartEvidence, wrong: Sequence[str]) -> tuple[str, ...]:
    """The axes along which only the own parts of the batch count in all wrong gradients; () for
    none.
    """
    places, found = {run.rank: run.coordinates for run in e.runs}, set[tuple[str, ...]]()
    axes, of_parts = e.axes_of_batch, {rank for ranks, _ in e.parts for rank in ranks}
    for rank, of_rank in e.fits.fits.items():
        for name in of_rank.keys() & set(wrong):
            shares, left = of_rank[name]
            both = list(zip(shares, e.parts, strict=True))
            counted, missing = (
                {r for share, (ranks, _) in both if (abs(share) > NEAR) is is_there for r in ranks}
                for is_there in (True, False)
            )
            own = tuple(a for a in axes if all(places[r][a] == places[rank][a] for r in counted))
            same = {r for r in of_parts if all(places[r][a] == places[rank][a] for a in own)}
            if left > LEFT or counted != same or counted & missing:
                return ()
            found.add(own)
    covered = all(any(n in own for own in e.fits.fits.values()) for n in wrong)
    return found.pop() if len(found) == 1 and covered else ()


def explain_uses(e: PartEvidence) -> Iterator[str]:
    """Gradients that lack, or have too often, what some of the parameter's uses add to them."""
    if e.failed("loss") and _of_terms(e):
        return
    wrong = e.failed("gradient")
    missing = {name for found in missing_sums(e, wrong) for name in found.names}
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in wrong:
        holders = [run.rank for run in e.runs if name in run.steps[e.step].gradients]
        found = {rank: one for rank in holders if (one := e.uses.get(rank, {}).get(name))}
        words = {rank: _of_uses(e, one) for rank, one in found.items()}
        if name not in missing and len(found) == len(holders):
            for rank, what in words.items():
                groups[what][name] += [rank]
    groups.pop("", None)
    for what, names in groups.items():
        who = e.named(list(names))
        ranks = sorted({rank for ranks in names.values() for rank in ranks})
        holders = [run.rank for run in e.runs if names.keys() & run.steps[e.step].gradients.keys()]
        yield Explained(
            f"{who}, {'which is' if be(who) == 'is' else 'each'} a sum over the uses of its "
            f"weight, {agree(who, 'are')} wrong, {e.where(ranks, holders)}: {what}. "
            "Each use has to add to the gradient: look for code that assigns it, or that lets "
            "only one of them count",
            names,
            is_exact=" counts " in what,
        )


def _of_uses(e: PartEvidence, found: UseFit) -> str:
    """Which uses of a parameter a gradient lacks, or has too often; "" for none."""
    counts = [one[0] if max(one) - min(one) < NEAR else None for one in found.counts]
    number = len(counts)

    def named(index: int) -> str:
        # A layer that runs several times has all of its uses in one line.
        line = f", {found.lines[index]}," if len(set(found.lines)) > 1 else ""
        return f"that of use {index + 1} of {number}{line}"

    lost = [i for i, n in enumerate(counts) if n is not None and abs(n) < NEAR]
    kept = [i for i, n in enumerate(counts) if n is not None and is_near(n, 1.0, NEAR)]
    if len(lost) + len(kept) == number and lost and kept:
        if len(kept) == 1 < len(lost):
            return f"only {named(kept[0])} is there"
        return f"{listed(map(named, lost), 3)} is missing"
    words = []
    for index, one in enumerate(found.counts):
        if counts[index] is not None and index not in kept:
            words += [f"{named(index)} counts {one[0]:.4g} times{e.equals(one[0])}"]
        elif counts[index] is None and len(one) == len(e.parts):
            of_use = describe_parts(one, e.fits.weights, e.names_of_parts)
            words += [f"of {named(index)} {of_use}"] if of_use else []
    return "; ".join(words)


def _of_own_rank(e: PartEvidence) -> set[frozenset[int]]:
    """For ranks whose gradients have only some parts of other ranks: the microbatches they lack."""
    found: set[frozenset[int]] = set()
    for rank, of_rank in e.fits.fits.items():
        for shares, left in of_rank.values():
            own, others = (
                {
                    (index or 0, abs(share) > NEAR)
                    for (ranks, index), share in zip(e.parts, shares, strict=True)
                    if (rank in ranks) is is_own
                }
                for is_own in (True, False)
            )
            if left < LEFT and len({counts for _, counts in others}) == 2:
                there = {index for index, counts in others if counts}
                lacks = {index for index, _ in others} - there
                if all((index, True) in own for index in lacks):
                    found.add(frozenset(lacks))
    return found


def explain_accumulated(e: PartEvidence) -> Iterator[str]:
    """Gradients to which more backward passes add than on one process."""
    often: dict[str, set[float]] = defaultdict(set)
    for trace in e.traces:
        for name, number in trace.accumulated.items():
            if known := e.accumulated.get(name):
                often[name].add(number / known)
    wrong = set(e.failed("gradient"))
    if not wrong or not wrong < often.keys() or any(len(found) > 1 for found in often.values()):
        return
    if list(missing_sums(e, sorted(wrong))):
        return
    own = {min(often[name]) for name in wrong}
    right = {min(found) for name, found in often.items() if name not in wrong}
    if len(own) == 1 and right and min(own) > max(right):
        yield e.explained(
            wrong,
            "wrong because more than their own loss is in them: backward passes add to them "
            f"{min(own):g} times as often as on one process, and to the others {max(right):g} "
            "times. Zero them between the backward passes of different losses, or keep the other "
            "loss from reaching these parameters",
        )


def explain_previous(e: PartEvidence) -> Iterator[str]:
    """Gradients of the step before, or weights, that are still there."""
    old = f"what they were in step {e.step - 1}", "gradients are not cleared between steps"
    of_weights = (
        "the weights themselves",
        ("the buffer that they are added to held the weights, or decay is added to them"),
    )
    # A term of the loss may be made of weights.
    own = {} if e.failed("loss") else e.fits.of_weights
    for found, (what, why) in ((e.fits.previous, old), (own, of_weights)):
        if names := [name for name in e.failed("gradient") if name in found]:
            who, often = e.named(names), {found[name] for name in names}
            times = f" {often.pop():g} times" if len(often) == 1 else ""
            yield Explained(
                f"{who} {'contains' if be(who) == 'is' else 'contain'}{times} {what}, too, and "
                f"{be(who)} right otherwise: {why}",
                names,
            )


def explain_microbatches(e: PartEvidence) -> Iterator[str]:
    """A step with another number of microbatches, divided by that of step 1."""
    now, first = e.num_microbatches, e.first_microbatches
    if now == first or not e.failed("gradient"):
        return
    parts = [run.steps[e.step].gradients.get(n) for run in e.runs for n in e.failed("gradient")]
    factor, left = pooled([part for part in parts if part is not None])
    if left < EXPLAINED and is_near(factor, now / first):
        yield Explained(
            f"the gradients are {factor:.6g} times as large as on one process: step {e.step} has "
            f"{now} microbatches, and each counts 1/{first}, as in step 1 with its {first}. Divide "
            "by the number of microbatches, or of targets, of the same step",
            e.failed("gradient"),
        )


def explain_clipped(e: PartEvidence) -> Iterator[str]:
    """All gradients scaled by one factor, so that their norm is the same in every step."""
    wrong, run = e.failed("gradient"), e.runs[0]
    if not wrong or len(run.steps) < 3 or set(wrong) != run.steps[e.step].gradients.keys():
        return
    norms = [math.sqrt(sum(g.aa for g in s.gradients.values())) for s in run.steps[1:]]
    factor, left = pooled([run.steps[e.step].gradients[name] for name in wrong])
    if left < EXPLAINED and 0 < factor < 1 and all(is_near(norm, norms[0]) for norm in norms):
        yield Explained(
            f"all gradients are {factor:.4g} times as large as on one process, and their norm is "
            f"{norms[0]:.4g} in every step: they are clipped, by too large a norm or too early. "
            "While gradients are multiplied by a loss scale, their norm is that much too large",
            wrong,
        )


def explain_rows(e: PartEvidence) -> Iterator[str]:
    """Gradients of which only a few rows differ."""
    wrong = e.failed("gradient")
    if any(not any(name in of_rank for of_rank in e.fits.rows.values()) for name in wrong):
        return
    every = [of_rank[name] for of_rank in e.fits.rows.values() for name in wrong if name in of_rank]
    if every and not any(one.rows for one in every):
        who = e.named(wrong)
        yield Explained(
            f"{who} {agree(who, 'differ')} only in elements that are zero on one process: what "
            "sets them to zero there, such as a mask or a hook of the parameter, is without effect",
            wrong,
        )
        return
    for name in wrong:
        found = {rank: of_rank[name] for rank, of_rank in e.fits.rows.items() if name in of_rank}
        one = next(iter(found.values()))
        holders = [run.rank for run in e.runs if name in run.steps[e.step].gradients]
        how = ", which is zero there, but not on one process" * one.is_zero
        how += ", which is zero on one process" * one.should_be_zero
        rows = sorted({row for of_rank in found.values() for row in of_rank.rows})
        why = "Look at how these rows are chosen (padding, a boundary between shards)"
        if all(of_rank.is_first for of_rank in found.values()):
            why = "It is the first row of each shard: indices of other shards that are set to 0 "
            why += "read it. Mask what they read where autograd sees the mask"
            if one.is_zero:
                why = "It is the first row of each shard: a padding_idx of 0 of the whole table, "
                why += "given to each shard, takes its gradient. Give it to the one that has it"
        elif all(of_rank.times for of_rank in found.values()):
            times = zip(one.rows, one.times, strict=True)
            often = listed([f"{number} (row {row})" for row, number in times], 3)
            why = f"These rows are too large by a factor of their own: {often}"
            if one.counted:
                why += f", how often its index is in {one.counted} (see scale_grad_by_freq)"
        elif parts := _parts_of_rows(e, found):
            why = f"In these rows {parts}. Add up what several ranks have for one row"
        yield Explained(
            f"the gradient of {name} differs only in {_rows(rows)} of {one.number}{how}, "
            f"{e.where(found, holders)}. {why}",
            [name],
        )


def _parts_of_rows(e: PartEvidence, found: Mapping[int, WrongRows]) -> str:
    """Which parts of the batch are missing in wrong rows, on each rank; "" if that is unknown."""
    words: dict[str, list[int]] = defaultdict(list)
    for rank, one in found.items():
        is_known = len(one.shares) == len(e.parts)
        what = describe_parts(one.shares, e.fits.weights, e.names_of_parts) if is_known else ""
        words[what].append(rank)
    if "" in words:
        return ""
    if len(words) == 1:
        return next(iter(words))
    return listed([f"{what}, {e.where(own, found)}" for what, own in words.items()])


def explain_without_gradient(e: PartEvidence) -> Iterator[str]:
    """A term that has no gradient, though its value is right."""
    found = next((t.without_gradient for t in e.watched if t.without_gradient), ())
    if found and e.failed("gradient"):
        call, source, reader = found
        why = "look for what detaches it, or for torch.no_grad"
        if any(t.events[call].is_checkpointed for t in e.traces if call in t.events):
            why = "return it from the reentrant checkpoint around it, or use use_reentrant=False"
        yield (
            f"a part of the gradients is missing: where {reader} reads the result of {source}, "
            f"that has no gradient, unlike on one process: {why}"
        )


def explain_logarithm(e: PartEvidence) -> Iterator[str]:
    """A loss that is too large by the logarithm of a degree."""
    if not e.failed("loss"):
        return
    own, known = e.runs[0].steps[e.step].loss, e.reference[e.step].loss
    for axis, degree in e.dims.degrees.items():
        if degree > 1 and is_near(abs(own - known), math.log(degree)):
            often = "once too often" if own > known else "too seldom"
            yield joined(
                f"the loss is {own:.6g} instead of {known:.6g}, which differ by log({degree}), and "
                f"{degree} is the degree of {axis}: inside a logarithm (a logsumexp), a sum over "
                f"{axis} is taken {often}",
                *explain_forward(e),
            )


def _of_terms(e: PartEvidence) -> str:
    """Which terms of a loss are wrong, if others are right; "" if that is unknown."""
    found = next((trace.wrong_terms for trace in e.watched if trace.wrong_terms), ())
    if not found:
        return ""
    lines, known = (
        listed(dict.fromkeys(filter(None, own)), 3)
        for own in ([one.line for one in found], [one.known_line for one in found])
    )
    if not lines or not known:
        is_more = "it has a term that the loss of one process does not have"
        return f"{is_more if lines else 'a term of one process is missing'}: {lines or known}"
    factors = {round(one.value / one.known, 6) if one.known else 0.0 for one in found}
    few = f"of its {found[0].number} terms, "
    few += f"that of {lines}" if len(found) == 1 else f"those of {lines}"
    there = "" if lines == known else f", in {known}"
    if len(factors) > 1:
        return f"{few} alone differ from one process{there}"
    factor = factors.pop()
    same = f", and {factor:g} is {name}" if (name := e.factor(factor)) else ""
    times = "is" if len(found) == 1 else "are"
    return f"{few} alone {times} {factor:g} times as large as on one process{there}{same}"


def explain_loss_of_code(e: PartEvidence) -> Iterator[str]:
    """The loss, if all that the model returns agrees."""
    if outputs_agree(e) or not any(trace.events for trace in e.traces):
        line = e.completed or e.first_wrong_line()
        last = e.forward_order[-1:] or ("",)
        if not line and any(last[0] in t.events and t.events[last[0]].is_padded for t in e.traces):
            line = f"{describe_event(last[0])}, which it reads, has {PADDING}"
        first = e.wrong_line()
        sides = one_sided(e, "", [run.rank for run in e.runs])
        more = [one for one in sides if first is None or not one.endswith(first.line)]
        line = joined(_of_terms(e), line, *more) or e.returned
        if not e.completed and (found := e.wrong_line()) and not found.source:
            line = joined(line, *(f"after the step, {one}" for one in explain_buffers(e)))
        for trace in e.watched:
            mask, number = trace.padding_counted
            if number:
                line = f"{mask} gives a mask that counts padding: {number} tokens on rank "
                line += f"{trace.rank}, which one process, without padding, does not have"
                break
        if e.alone:
            line = (
                f"it is the mean of the losses of {e.alone} alone: this loss compares samples with "
                "each other (negatives, statistics), and those of the other parts are missing. "
                "Compute it once, for the whole batch"
            )
        for sentence in explain_loss(e):
            yield joined(sentence, line)


STAGES: Sequence[Sequence[Callable[[PartEvidence], Iterable[str]]]] = (
    (explain_shards, explain_start_of_code),
    (explain_changed,),
    (explain_cover,),
    (explain_untrained,),
    (explain_frozen,),
    (explain_missing,),
    (explain_recomputation,),
    (explain_kept,),
    (explain_lost_contents,),
    (explain_logarithm,),
    (explain_forward,),
    (explain_ties,),
    (explain_microbatches, explain_previous),
    (explain_passes, explain_hooks, explain_buckets),
    (explain_step_of_local_gradients,),
    (explain_parts,),
    (explain_uses,),
    (explain_loss_of_code,),
    (explain_without_gradient,),
    (explain_lost,),
    (explain_order,),
    (explain_mixed,),
    (explain_backward,),
    (explain_unreached,),
    (explain_accumulated,),
    (explain_clipped,),
    (explain_gradients,),
    (explain_rows,),
    (explain_norm_alone,),
    (explain_update,),
    (explain_state, explain_buffers),
)
