"""On a rank: records where the tokens of expert layers go, and compares it with the reference's.

    recorded_routing    the experts of each token, and the rows that each expert computed
    followed_routing    the tokens that go elsewhere in a step; can send them the reference's way
    compare_routing     a trace's routing, and the gradients of the experts one by one

In float32 and bfloat16, two scores can be closer than their rounding error. The token then goes to
another expert under another plan, and everything after it differs by more than rounding error.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titanlite.job import Job
from titanlite.modules.batch import Batch
from titanlite.modules.experts import ExpertLayer, RoutedLayer, expert_layers
from titanlite.modules.shards import is_sharded, local_part, offsets_of, shard_of
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.parts import ExpectedPart
from titanlite.tools.verify.record import Agreement, ExpertTrace, MovedToken

# The dimensions of sequences and of tokens in what a router returns.
LABELS = (1, 0)


@dataclass
class RoutingOfStep:
    """What an expert layer did in the forward passes of a step, in the order of its calls."""

    chosen: list[Tensor] = field(default_factory=list)
    """The experts of each token, [T, B, K]."""
    margins: list[Tensor] = field(default_factory=list)
    """By how much the last chosen expert's rank value exceeds that of the next one, [T, B]."""
    rows: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Expert -> the rows that it computed on this rank."""
    squares: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Expert -> the sum of the squares of their results."""


@contextlib.contextmanager
def recorded_routing(job: Job) -> Iterator[dict[str, RoutingOfStep]]:
    """Inside, the routing of every expert layer is recorded by the layer's name."""
    layers = expert_layers(job.parts)
    found = {name: RoutingOfStep() for name in layers}
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(_recorded(job, layer, found[name]))
        yield found


@contextlib.contextmanager
def followed_routing(
    job: Job, batches: list[Batch], known: Mapping[str, Mapping[str, Tensor]], *, replay: bool
) -> Iterator[dict[str, tuple[MovedToken, ...]]]:
    """Inside, runs a step's routing; the dict has, on exit, each layer's tokens that go elsewhere.

    `known` is the `routing_record` of the reference's step. With `replay`, all tokens are sent to
    the experts that the reference chose, in recomputation too.
    """
    found: dict[str, tuple[MovedToken, ...]] = {}
    own = ExpectedPart(job, batches)
    layers = {name: layer for name, layer in expert_layers(job.parts).items() if name in known}
    with recorded_routing(job) as routed:
        # A router of transformers cannot be told.
        replayed = {n: one for n, one in layers.items() if replay and isinstance(one, ExpertLayer)}
        replays = {name: _Replay(own, known[name]["chosen"]) for name in replayed}
        for name, layer in replayed.items():
            layer.router.choose = replays[name]
        try:
            yield found
        finally:
            for layer in replayed.values():
                layer.router.choose = None
        for name in layers:
            if name in replays:
                routed[name].chosen = [choice.cpu() for choice, _ in replays[name].calls]
            found[name] = _moved(own, routed[name], known[name])


class _Replay:
    """Replaces the experts that a router chooses by those of the reference."""

    def __init__(self, own: ExpectedPart, known: Tensor) -> None:
        self.own, self.known = own, known
        self.calls: list[tuple[Tensor, Tensor]] = []
        """In the order of the microbatches: the router's choice, and the reference's."""

    def __call__(self, chosen: Tensor) -> Tensor:
        if _is_recomputed():
            # Recomputation makes the same choice again, in any order of microbatches.
            return next(there for here, there in self.calls if torch.equal(here, chosen))
        part = self.own.part_of_call(len(self.calls), chosen, self.known, LABELS)
        replaced = chosen if part is None else part.to(chosen.device)
        self.calls.append((chosen, replaced))
        return replaced


@contextlib.contextmanager
def _recorded(job: Job, layer: RoutedLayer, found: RoutingOfStep) -> Iterator[None]:
    experts: Any = layer.experts
    compute = experts._compute
    first = 0
    if experts.exchange is not None and job.meshes.ep is not None:
        first = job.meshes.ep.get_local_rank() * (layer.num_experts // experts.exchange.size)

    def keep(router: Any, inputs: Any, output: Any) -> None:
        if not _is_recomputed():
            found.chosen.append(output.chosen.detach().cpu().clone())
            ranked = output.scores.detach()
            if layer.expert_bias is not None:
                ranked = ranked + layer.expert_bias
            values = ranked.sort(-1, descending=True).values
            last = min(router.top_k, layer.num_experts - 1)
            found.margins.append((values[..., last - 1] - values[..., last]).cpu())

    def count(rows: Tensor, counts: Tensor, *sizes: list[int], **how: bool) -> Tensor:
        outputs: Tensor = compute(rows, counts, *sizes, **how)
        if not _is_recomputed():
            numbers = counts.tolist()
            each = outputs.detach()[: sum(numbers)].double().split(numbers)
            for expert, part in enumerate(each, start=first):
                found.rows[expert] += len(part)
                found.squares[expert] += part.square().sum().item()
        return outputs

    def keep_given(_: Any, inputs: Any) -> None:
        # A router of transformers has tokens [N], and does not say how close its choice was.
        if not _is_recomputed():
            length = job.resolved.seq_len // job.dims.num_token_shards
            chosen = inputs[1].detach().cpu().unflatten(0, (-1, length)).transpose(0, 1)
            found.chosen.append(chosen)
            found.margins.append(torch.full(chosen.shape[:2], torch.nan))

    hook = (
        layer.router.register_forward_hook(keep)
        if isinstance(layer, ExpertLayer)
        else experts.register_forward_pre_hook(keep_given)
    )
    experts._compute = count
    try:
        yield
    finally:
        hook.remove()
        del experts._compute


def _is_recomputed() -> bool:
    return torch._C._current_graph_task_id() != -1


def compare_routing(
    job: Job,
    own: ExpectedPart,
    found: Mapping[str, RoutingOfStep],
    known: Mapping[str, Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor],
) -> dict[str, ExpertTrace]:
    """This rank's routing compared with `known`: the reference's "chosen" and "margins" by layer.

    `gradients` are the reference's whole gradients.
    """
    return {
        name: ExpertTrace(
            rows=dict(routing.rows),
            squares=dict(routing.squares),
            expected_squares=tuple(known[name]["squares"].tolist()),
            num_tokens=sum(chosen[..., 0].numel() for chosen in routing.chosen),
            moved=_moved(own, routing, known[name]),
            gradients=_by_expert(job, name, gradients),
        )
        for name, routing in found.items()
        if name in known
    }


def _moved(
    own: ExpectedPart, routing: RoutingOfStep, known: Mapping[str, Tensor]
) -> tuple[MovedToken, ...]:
    """The tokens of this rank that went to other experts than on the reference."""
    tokens = []

    def of_rank(calls: list[Tensor], whole: Tensor) -> list[Tensor]:
        selects = (own.select(i, call, len(calls), LABELS) for i, call in enumerate(calls))
        return [select(whole) for select in selects]

    parts = of_rank(routing.chosen, known["chosen"])
    margins, positions, sequences = (
        of_rank(routing.margins, known[name]) for name in ("margins", "positions", "sequences")
    )
    for index, (chosen, part) in enumerate(zip(routing.chosen, parts, strict=True)):
        if part.shape != chosen.shape:
            continue
        differs = (chosen.sort(-1).values != part.sort(-1).values).any(-1)
        for t, b in differs.nonzero().tolist():
            tokens.append(
                MovedToken(
                    call=index,
                    sequence=int(sequences[index][t, b]),
                    position=int(positions[index][t, b]),
                    experts=tuple(chosen[t, b].tolist()),
                    expected=tuple(part[t, b].tolist()),
                    margin=float(margins[index][t, b]),
                )
            )
    return tuple(sorted(tokens, key=lambda token: (token.sequence, token.position)))


def _by_expert(
    job: Job, layer: str, gradients: Mapping[str, Tensor]
) -> dict[str, dict[int, Agreement]]:
    """Parameter -> expert -> this rank's part of that expert's gradient, compared."""
    found: dict[str, dict[int, Agreement]] = {}
    for name, parameter in job.parameters.items():
        is_own = name.rpartition(".")[0] == f"{layer}.experts"
        if not is_own or parameter.grad is None or name not in gradients:
            continue
        own, whole = local_part(parameter.grad.detach()), gradients[name]
        part = shard_of(whole, parameter)
        placements = getattr(parameter, "placements", ())
        if any(is_sharded(p) and getattr(p, "dim", 0) != 0 for p in placements):
            continue  # by rows: the factors of the whole tensor say enough
        first = offsets_of(parameter)[0]
        found[name] = {
            first + index: agreement(one, expected, whole[first + index])
            for index, (one, expected) in enumerate(zip(own, part, strict=True))
        }
    return found


def routing_record(found: Mapping[str, RoutingOfStep]) -> dict[str, dict[str, Tensor]]:
    """The reference's routing: for each layer, tensors over all its sequences."""
    record = {}
    for name, routing in found.items():
        chosen = torch.cat(routing.chosen, dim=1)
        length, number = chosen.shape[:2]
        record[name] = {
            "chosen": chosen,
            "squares": torch.tensor([*routing.squares.values()], dtype=torch.float64),
            "margins": torch.cat(routing.margins, dim=1),
            "positions": torch.arange(length).unsqueeze(1).expand(length, number),
            "sequences": torch.arange(number).expand(length, number),
        }
    return record
