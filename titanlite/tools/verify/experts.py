"""What is wrong with experts: routing, dispatch, combination, loads, gradients; torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from titanlite.tools.verify.dataflow import outputs_agree, outputs_differ
from titanlite.tools.verify.evidence import EXPLAINED, WRONG, JobEvidence, pooled
from titanlite.tools.verify.jobs import microbatch_size
from titanlite.tools.verify.record import Agreement, ExpertTrace, MovedToken, RankRun
from titanlite.tools.verify.wording import is_near, listed


def moved_tokens(runs: Sequence[RankRun]) -> list[str]:
    """For each step and expert layer, the tokens that went to other experts, in one sentence."""
    found = []
    for step in range(len(runs[0].steps)):
        by_layer: dict[str, list[MovedToken]] = defaultdict(list)
        for run in runs:
            for layer, of_rank in run.steps[step].moved.items():
                by_layer[layer] += of_rank
        for layer, tokens in by_layer.items():
            if tokens:
                first = min(tokens, key=lambda token: (token.sequence, token.position))
                found.append(
                    f"step {step}: {layer} routes {len(tokens)} token{'s' * (len(tokens) > 1)} "
                    f"elsewhere, first token {first.position} of sequence {first.sequence} to "
                    f"experts {listed(first.experts)}, not {listed(first.expected)}; the largest "
                    f"margin of a score is {max(token.margin for token in tokens):.1e}"
                )
    return found


def explain_experts(e: JobEvidence) -> Iterator[str]:
    """The first expert layer whose tokens take another way than on one process."""
    known = {} if e.reference_trace is None else e.reference_trace.experts
    order = {name: place for place, name in enumerate(e.forward_order)}
    for layer in sorted(known, key=lambda name: order.get(name, len(order))):
        seen = {t.rank: t.experts[layer] for t in e.traces if layer in t.experts}
        if not seen:
            continue
        # The router is the first to compute in its layer.
        first = next((n for n in e.forward_order if n.startswith(f"{layer}.")), f"{layer}.router")
        router = ".".join(first.split(".")[: layer.count(".") + 2])
        before = e.forward_order[: order.get(first, 0)]
        if any(outputs_differ(e, name) for name in before):
            return  # its input is wrong already
        moved = {rank: trace.moved for rank, trace in seen.items() if trace.moved}
        if moved:
            yield _elsewhere(e, router, moved, seen)
            return
        rows = _rows(seen, len(known[layer]))
        copies = max(1, sum(rows) // max(1, sum(known[layer])))
        if rows != [copies * count for count in known[layer]]:
            yield _wrong_rows(layer, rows, known[layer], are_sent=e.dims.ep_enabled)
            return
        if outputs_differ(e, f"{layer}.experts"):
            ranks = [
                t.rank
                for t in e.traces
                if (found := t.modules.get(f"{layer}.experts")) is not None and found.wrong_calls
            ]
            yield (
                f"{layer} routes every token as one process does, and each expert computes as many "
                f"rows as there, but the output of {layer}.experts differs, "
                f"{e.where(ranks, seen)}: {_why_outputs_differ(e, copies, seen)}"
            )
            return
        if outputs_differ(e, f"{layer}.shared_experts"):
            return
        if outputs_differ(e, layer):
            yield (
                f"the outputs of {layer}.experts and {layer}.shared_experts agree, but their sum, "
                f"the output of {layer}, differs: one of them is reduced over ranks once more, or "
                "is added more than once"
            )
            return


def _why_outputs_differ(e: JobEvidence, copies: int, seen: dict[int, ExpertTrace]) -> str:
    (expected, *_) = (trace.expected_squares for trace in seen.values())
    found = [
        sum(trace.squares.get(expert, 0.0) for trace in seen.values())
        for expert in range(len(expected))
    ]
    if all(is_near(a, copies * b, 1e-4) for a, b in zip(found, expected, strict=True)):
        return (
            "each expert's results are right, and are not combined as they must be. On their way "
            "back rows change their order or are lost, or the router's weights do not count once"
        )
    if not e.dims.ep_enabled:
        return "its weights or its product differ"
    return (
        "rows reach another expert's weights. Check the offset of each rank's first expert, and "
        "that the order of dispatch is undone exactly"
    )


def _elsewhere(
    e: JobEvidence, router: str, moved: dict[int, tuple], seen: dict[int, ExpertTrace]
) -> str:
    number = sum(map(len, moved.values()))
    total = sum(trace.num_tokens for trace in seen.values())
    first = min(
        (token for tokens in moved.values() for token in tokens),
        key=lambda token: (token.sequence, token.position),
    )
    margin = (
        ", although on one process the lowest chosen score, bias included, is "
        f"{first.margin:.1e} above the highest score that is not chosen"
    ) * (not math.isnan(first.margin))
    is_later = all(token.call > 0 for tokens in moved.values() for token in tokens)
    return (
        f"{router} sends {number} of {total} tokens to other experts than one process, "
        f"{e.where(moved, seen)}. The first is token {first.position} of sequence "
        f"{first.sequence}: it goes to experts {listed(first.experts)}, not "
        f"{listed(first.expected)}{margin}. Its input agrees, so the scores, the "
        "balancing bias or the choice is wrong"
        + (
            ". The first microbatch agrees: the balancing bias changes within the step. Update it "
            "once, before the optimizer's step, from the counts of all microbatches"
            if is_later
            else ""
        )
    )


def _rows(seen: dict[int, ExpertTrace], num_experts: int) -> list[int]:
    return [
        sum(trace.rows.get(expert, 0) for trace in seen.values()) for expert in range(num_experts)
    ]


def _wrong_rows(layer: str, rows: Sequence[int], known: Sequence[int], *, are_sent: bool) -> str:
    wrong = [expert for expert, count in enumerate(rows) if count != known[expert]]
    shown = listed(
        (f"expert {expert} computes {rows[expert]} rows, not {known[expert]}" for expert in wrong),
        3,
    )
    return f"{layer} routes every token as one process does, but {shown}: rows are lost" + (
        ", padded or sent to the wrong rank on their way to the experts. Compare the counts that "
        "ranks exchange with the rows that they send"
        if are_sent
        else " or padded before the experts' products"
    )


def explain_loads(e: JobEvidence) -> Iterator[str]:
    """Counts of tokens by expert, and balancing biases, that differ though the routing agrees."""
    wrong = e.failed("load")
    if wrong:
        layer = wrong[0]
        known = e.reference[e.step].loads[layer]
        own = {run.rank: run.steps[e.step].loads.get(layer, ()) for run in e.runs}
        counts = next(iter(own.values()))
        ratios = {a / b for a, b in zip(counts, known, strict=True) if b} or {1.0}
        where = (
            f"the numbers of tokens of each expert of {layer}, from which its balancing bias is "
            "updated, are"
        )
        if len(set(own.values())) > 1:
            yield (
                f"{where} {list(counts)} on rank 0 and {list(known)} on one process, and ranks "
                "have different ones: sum the counts over every axis that splits tokens (data "
                "parallel, cp, and the sequence shards of tp)"
            )
        elif max(ratios) == min(ratios):
            factor = ratios.pop()
            yield (
                f"{where} {factor:g} times those of one process{e.equals(factor, form='; {}')}: "
                "tokens are counted once more on each rank that holds them, or again when a "
                "forward pass is recomputed. Count each token once, on the rank that routes it"
            )
        else:
            yield (
                f"{where} {list(counts)}, and {list(known)} on one process: some microbatches or "
                "ranks are missing in the sum"
            )
        return
    biases = [name for name in e.failed("buffer") if name.endswith(".expert_bias")]
    if biases and not e.failed("gradient"):
        yield (
            f"the balancing bias {biases[0]} differs after step {e.step}, although the tokens by "
            "expert agree: it is updated more than once a step, or from part of the counts. Update "
            "it once, before the optimizer's step, from the counts of all microbatches"
        )


def explain_auxiliary_loss(e: JobEvidence) -> Iterator[str]:
    """An auxiliary loss that differs though the routing agrees."""
    if not e.failed("auxiliary_loss") or not outputs_agree(e):
        return
    own, known = e.runs[0].steps[e.step].auxiliary_loss, e.reference[e.step].auxiliary_loss
    assert own is not None
    assert known is not None
    ratio = own / known
    size = microbatch_size(e.job)
    same = e.factor(ratio)
    if size > 1 and is_near(ratio * size, 1.0):
        same = "1 over the number of sequences of a microbatch"
    yield (
        f"the auxiliary loss is {ratio:.6g} times as large as on one process, although every token "
        f"goes to the same experts as there{f': {ratio:.6g} is {same}' if same else ''}. Sum it "
        "over sequences, divide by the number of sequences of the step, and count each sequence's "
        "tokens over cp and tp before you multiply"
    )


def explain_expert_gradients(e: JobEvidence) -> Iterator[str]:
    """Gradients that are wrong for routed experts only, or for some experts of a layer."""
    failed = e.failed("gradient")
    if failed and all(map(_is_of_experts, failed)) and outputs_agree(e):
        parts = [
            part
            for trace in e.traces
            for of_layer in trace.experts.values()
            for of_experts in of_layer.gradients.values()
            for part in of_experts.values()
            if part.difference > WRONG
        ]
        if parts and all(pooled([part])[1] >= EXPLAINED for part in parts):
            yield (
                "only the gradients of routed experts differ, by no common factor, and the "
                "gradients of the experts' inputs agree: padded rows, which are not tokens, "
                "contributed to the experts' gradients. Give padded rows a gradient of zero, or "
                "drop them before the product"
            )
            return
    for name in failed:
        if not _is_of_experts(name):
            continue
        layer = name.rpartition(".experts.")[0]
        by_expert: dict[int, list[Agreement]] = defaultdict(list)
        for trace in e.traces:
            found = trace.experts.get(layer)
            for expert, part in (found.gradients.get(name, {}) if found else {}).items():
                by_expert[expert].append(part)
        wrong = {
            expert: pooled(some)
            for expert, some in by_expert.items()
            if max(part.difference for part in some) > WRONG
        }
        if not wrong or len(wrong) == len(by_expert):
            continue
        factors = {round(factor, 6) for factor, left in wrong.values() if left < EXPLAINED}
        how = ""
        if len(factors) == 1 and not is_near(factor := factors.pop(), 1.0):
            how = f": {factor:g} times as large{e.equals(factor, form=', and {}')}"
        yield (
            f"the gradient of {name} is wrong for experts {listed(sorted(wrong), 8)} of "
            f"{len(by_expert)} only{how}. Look at the ranks that hold these experts, and at the "
            "rows that they receive"
        )
        return


def _is_of_experts(name: str) -> bool:
    layer, _, leaf = name.rpartition(".experts.")
    return bool(layer) and leaf in ("w1", "w2", "w3")
