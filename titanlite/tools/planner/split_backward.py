"""The halves of a backward pass that a schedule splits: up to the input, and of the weights.

PyTorch runs both in the graph of the forward pass. No torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from titanlite.quantities import ITEMSIZE
from titanlite.schedule.actions import BACKWARD_WEIGHT
from titanlite.tools.planner.composition import ModelPart, Segment, Weight
from titanlite.tools.planner.events import Allocation, Event, Operator, Wait

BACKWARD_PHASE = "backward"


def half_of(
    part: ModelPart, kind: str, boundary_bytes: int, of_weights: int, *, has_gradients: bool
) -> Segment:
    """The backward pass of a part up to its input (BACKWARD_INPUT), or of its weights.

    The products of weight gradients, which have a weight's shape, are left for the second half.
    Until it has run, PyTorch keeps the graph of the first half: its activations, and the gradients
    from which those of the weights are computed: one for each product and each vector. It runs the
    second half once for each of these. Under activation checkpointing each time recomputes the
    part. What has been recomputed is there until the last one has run, but for the inputs of those
    before. In the pieces, `of_weights` of the temporary bytes are the gradients of the weights.
    """
    whole = part.backward
    events: list[Event] = []
    read = _read_for_vectors(part, boundary_bytes)
    is_later = _weight_products(part)
    for index, event in enumerate(whole.events):
        if (index in is_later) == (kind == BACKWARD_WEIGHT):
            events.append(event)
        if index in is_later and isinstance(event, Operator):
            _, outputs, inputs, _ = event.shape
            read += event.bytes_read * outputs // (outputs + inputs)
    kept = whole.net.get("activations", 0)
    if kind == BACKWARD_WEIGHT:
        gradients = 0 if has_gradients else whole.net.get("gradients", 0)
        net = {"activations": kept - read, "gradients": gradients}
        peak = {}
        if part.recomputed_bytes:
            times = len(is_later) + len(_modules_of_vectors(part))
            events = [*_recomputation(whole) * times, *events]
            left = (times - 1) * part.recomputed_bytes
            net["temporary"], peak = left, {"temporary": left + whole.peak.get("temporary", 0)}
        return replace(whole, events=tuple(events), net=net, peak=peak)
    without = ("gradients", "activations")
    net = {name: num_bytes for name, num_bytes in whole.net.items() if name not in without}
    peak = {name: num_bytes for name, num_bytes in whole.peak.items() if name not in without}
    net["activations"] = read
    at_end = read + max(0, part.late_bytes - of_weights)
    if at_end > sum(peak.values()):
        peak = {"activations": read, "temporary": at_end - read}
    return replace(whole, events=tuple(events), net=net, peak=peak)


def _read_for_vectors(part: ModelPart, boundary_bytes: int) -> int:
    """The bytes of the gradients from which those of biases and norms' weights are computed.

    That of a vector is a sum over tokens. A bias of a product that adds it itself has the gradient
    of the product, which its sum follows. A norm whose kernel sums inside has one of
    `boundary_bytes`.
    """
    matrices = {_module_of(weight) for weight in part.weights if len(weight.shape) > 1}
    vectors = [w for w in part.weights if w.is_trained and len(w.shape) == 1]
    read, is_product = 0, False
    for event in part.backward.events:
        if not isinstance(event, Operator):
            continue
        if event.name == "aten::sum" and event.place.phase == BACKWARD_PHASE:
            numel = event.bytes_written // ITEMSIZE.get(event.dtype, 4)
            module = f"{event.place.module}."
            of = next((w for w in vectors if w.numel == numel and w.name.startswith(module)), None)
            if of is not None:
                vectors.remove(of)
                read += 0 if is_product else event.bytes_read
        is_product = bool(event.shape)
    return read + boundary_bytes * len({_module_of(weight) for weight in vectors} - matrices)


def _modules_of_vectors(part: ModelPart) -> set[str]:
    """The modules with trained vectors alone: norms."""
    trained = [weight for weight in part.weights if weight.is_trained]
    matrices = {_module_of(weight) for weight in trained if len(weight.shape) > 1}
    return {_module_of(weight) for weight in trained} - matrices


def _recomputation(segment: Segment) -> list[Event]:
    """The events of a recomputation, with the waits for its communication."""
    found: list[Event] = []
    started: set[int] = set()
    for event in segment.events:
        if isinstance(event, Wait):
            if event.number in started:
                found.append(event)
        elif not isinstance(event, Allocation) and event.place.phase == "recomputation":
            found.append(event)
            started.add(getattr(event, "number", 0))
    return found


def _module_of(weight: Weight) -> str:
    return weight.name.rpartition(".")[0]


def _weight_products(part: ModelPart) -> set[int]:
    """The positions of the products that give weight gradients, among the backward pass' events.

    They have a weight's shape. If the number of tokens is that of a weight's rows, the product of
    an input gradient can have one, too: in each module it follows that of the weight gradient.
    """
    # The weights of experts are stacked.
    matrices = [weight for weight in part.weights if len(weight.shape) > 1]
    shapes = {weight.shape[-2:] for weight in matrices}
    # The layers of a module that multiply the same input can be one product.
    rows: Counter[tuple[str, int]] = Counter()
    for weight in matrices:
        rows[weight.name.rsplit(".", 2)[0], weight.shape[-1]] += weight.shape[-2]
    shapes |= {(num_rows, columns) for (_, columns), num_rows in rows.items()}
    shapes |= {shape[::-1] for shape in shapes}
    found: set[int] = set()
    has_weight_gradient: dict[str, bool] = {}
    for index, event in enumerate(part.backward.events):
        if not isinstance(event, Operator) or not event.shape:
            continue
        _, m, n, k = event.shape
        if (m, n) not in shapes or event.place.phase != BACKWARD_PHASE:
            continue
        module = event.place.module
        if (k, n) in shapes and has_weight_gradient.get(module):
            has_weight_gradient[module] = False
        else:
            has_weight_gradient[module] = True
            found.add(index)
    return found
