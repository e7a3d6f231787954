"""What other software than titanlite's does in a block: the events of a traced one, changed.

    Pieces -> on_software -> Pieces, for the [software] of a hardware file (hardware.Software)

Attention without its fused kernel is a matter of cost.py, and an RMSNorm of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from titanlite.config import ResolvedJob
from titanlite.tools.planner.composition import Pieces, Segment
from titanlite.tools.planner.cost import PRODUCT, Cost
from titanlite.tools.planner.events import Communication, Event, Operator, Site, Wait
from titanlite.tools.planner.hardware import Software

TODAY = Software()


def on_software(pieces: Pieces, software: Software, resolved: ResolvedJob) -> Pieces:
    """The pieces of a job on `software`; memory stays as it is."""
    dims, model = resolved.dims, resolved.model

    def changed(segment: Segment) -> Segment:
        events: Sequence[Event] = segment.events
        if software.ring == "torch 2.6" and dims.cp > 1:
            repeats = getattr(model, "n_heads", 1) // getattr(model, "kv_heads", 1)
            events = [*with_ring_of_torch_2_6(events, dims.cp, repeats)]
        if not software.sequence_parallel:
            events = [_of_whole_sequence(event, dims.tp) for event in events]
        if not software.joins_weights:
            events = [event for event in events if getattr(event, "name", "") != "aten::cat"]
        if software.fuses_tp and dims.tp > 1:
            events = [*_with_fused_products(events)]
        return replace(segment, events=tuple(events))

    blocks = (
        replace(
            part,
            forward=changed(part.forward),
            backward=changed(part.backward),
            around_experts=tuple(map(changed, part.around_experts)),
        )
        for part in pieces.blocks
    )
    return replace(pieces, blocks=tuple(blocks))


def with_ring_of_torch_2_6(events: Sequence[Event], cp: int, repeats: int) -> Iterator[Event]:
    """The messages of PyTorch's ring of context parallelism, December 2024.

    TorchTitan repeats the heads of K and V before attention, `repeats` times, and the ring moves
    what it is given (torchtitan/models/llama/model.py). It gathers K and V, and sends their
    gradients on after each of its `cp` steps (torch/distributed/tensor/experimental/_attention.py).
    In a compiled block each is waited for where it is issued, and the gather of the recomputation
    serves the backward pass too (_functional_collectives.py; _functorch/compile_utils.py).
    """
    waited: set[int] = set()
    for event in events:
        if isinstance(event, Communication) and event.axis == "cp":
            waited.add(event.number)
            is_gather = event.kind == "all_gather"
            if not (is_gather and event.place.phase == "backward"):
                # A reduction of cp - 1 steps.
                num_bytes = event.num_bytes * repeats * (1 if is_gather else cp / (cp - 1))
                yield from (replace(event, num_bytes=int(num_bytes)), Wait(event.number))
        elif not (isinstance(event, Wait) and event.number in waited):
            yield event


def _of_whole_sequence(event: Event, tp: int) -> Event:
    """Norms and residual sums read and write the whole sequence on each rank of tp."""
    if not isinstance(event, Operator) or event.flops:
        return event
    leaf = event.place.module.rsplit(".", 1)[-1]
    factor = tp if leaf.endswith("_norm") or leaf.isdigit() else 1
    read, written = event.bytes_read * factor, event.bytes_written * factor
    return replace(event, bytes_read=read, bytes_written=written)


def _with_fused_products(events: Sequence[Event]) -> Iterator[Event]:
    """Each collective over tp in parts, which move while a product of its module runs in parts.

    It is the largest: the first of these after a gather, and the last before a reduction.
    """
    products: dict[Site, list[tuple[int, int]]] = {}
    fused: dict[int, Communication] = {}
    number = 0
    for at, event in enumerate(events):
        if isinstance(event, Operator) and event.flops and Cost.kind(event) == PRODUCT:
            products.setdefault(event.place, []).append((event.flops, at))
        number = max(number, getattr(event, "number", 0))
    for event in events:
        if isinstance(event, Communication) and event.axis == "tp" and event.place in products:
            near = products[event.place]
            if event.kind == "all_gather":
                fused[min(near, key=lambda one: (-one[0], one[1]))[1]] = event
            elif event.kind == "reduce_scatter":
                fused[max(near)[1]] = event
    gone = {event.number for event in fused.values()}
    for at, event in enumerate(events):
        whole = fused.get(at)
        if whole is not None and isinstance(event, Operator):
            n, (batch, m, *rest) = whole.num_ranks, event.shape
            flops, read, written = event.flops, event.bytes_read, event.bytes_written
            part = replace(event, flops=flops // n, shape=(batch, -(-m // n), *rest))
            part = replace(part, bytes_read=read // n, bytes_written=written // n)
            message = replace(whole, kind="receive", num_bytes=whole.num_bytes // n, peer=1)
            yield part
            for _ in range(n - 1):
                number += 1
                yield from (message.renumbered(number), part, Wait(number))
            if whole.kind == "reduce_scatter":
                # The sum of all ranks' parts.
                part = replace(part, name="aten::sum", flops=0, shape=())
                yield replace(part, bytes_read=whole.num_bytes, bytes_written=message.num_bytes)
        elif getattr(event, "number", -1) not in gone:
            yield event
