"""The gaps that torch's allocator leaves on the main stream in the stages of a pipeline. No torch.

    allocations of the traced parts -> gaps_of_stages -> bytes, for a first, a middle, a last stage

Which blocks of memory are there at once depends on the order of a stage's microbatches, which no
trace of one microbatch has. So the allocations of a small stage are replayed: four blocks, and
three microbatches under way. More of either changes the gaps little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from titanlite.tools.planner.allocator import SMALL, Allocator
from titanlite.tools.planner.events import Allocation, Event, Operator

FORWARD, BACKWARD = "forward", "backward"
NUM_BLOCKS, UNDER_WAY, NUM_MICROBATCHES = 4, 3, 5
OUT, IN, GRADIENT_OUT, GRADIENT_IN = "output", "input", "gradient of the input", "gradient"
OWN, OF_WEIGHTS = "own", "gradient of a weight"

Runs = Mapping[tuple[str, str], Sequence[Event]]
Label = tuple[str, int]
"""What a block of memory is to its part, and its number there."""


class _Part(NamedTuple):
    """The allocations of a part of the model, and of each weight: gathered, and gradients' sum."""

    forward: list[tuple[Label, int]]
    backward: list[tuple[Label, int]]
    weights: Sequence[tuple[int, int]]


def gaps_of_stages(
    runs: Runs, order: Sequence[str], weights: Mapping[str, Sequence[tuple[int, int]]]
) -> tuple[int, int, int]:
    """The bytes in gaps of a stage with the embeddings, of one with blocks alone, and of the last.

    `order` has the traced parts as the forward pass runs them: "before", blocks, "after". `weights`
    has the bytes of each weight of a part: as it computes, and of the sum of its gradients; without
    FSDP2 none.
    """
    # The last block is the most typical.
    first, block, last = (
        _Part(
            [*_labelled(runs, order, at, FORWARD)],
            [*_labelled(runs, order, at, BACKWARD)],
            weights.get(order[at], ()),
        )
        for at in (0, len(order) - 2, len(order) - 1)
    )
    blocks = [block] * NUM_BLOCKS
    return _gaps([first, *blocks]), _gaps(blocks), _gaps([*blocks, last])


def _labelled(runs: Runs, order: Sequence[str], at: int, phase: str) -> Iterator[tuple[Label, int]]:
    """The allocations of the part at `at` in one of its passes."""
    made: dict[int, tuple[int, str]] = {}
    freed: dict[int, int] = {}
    passes = [(place, FORWARD) for place in range(len(order))]
    passes += [(place, BACKWARD) for place in reversed(range(len(order)))]
    for place, of in passes:
        for event in _allocations(runs, order[place], of):
            if event.num_bytes:
                made.setdefault(event.block, (place, of))
            else:
                freed[event.block] = place
    # Gradients: they stay, or what FSDP2 does with them after the last operator is left out.
    of_weights = {b for b, one in made.items() if one == (at, BACKWARD) and b not in freed}
    for one in reversed(runs[order[at], BACKWARD]):
        if isinstance(one, Operator):
            break
        if isinstance(one, Allocation) and made.get(one.block) == (at, BACKWARD):
            of_weights.add(one.block)
    for event in _allocations(runs, order[at], phase):
        block = event.block
        # Small blocks have segments of their own, of a few MiB.
        if block not in made or 0 < event.num_bytes <= SMALL:
            continue
        place, of = made[block]
        if block in of_weights:
            yield (OF_WEIGHTS, block), event.num_bytes
        elif place == at and freed.get(block, at) == at:
            yield (OWN, block), event.num_bytes
        elif place == at:
            yield (OUT if of == FORWARD else GRADIENT_OUT, 0), event.num_bytes
        else:
            yield (IN if of == FORWARD else GRADIENT_IN, 0), event.num_bytes


def _allocations(runs: Runs, name: str, phase: str) -> Iterator[Allocation]:
    return (event for event in runs[name, phase] if isinstance(event, Allocation))


class _Memory:
    """The main stream's memory: what is there, at most, and what the allocator takes."""

    def __init__(self) -> None:
        self._allocator = Allocator(is_exact=True)
        self._numbers: dict[object, int] = {}
        self._sizes: dict[int, int] = {}
        self._now = self._most = 0

    def resize(self, key: object, num_bytes: int) -> None:
        block = self._numbers.setdefault(key, len(self._numbers))
        change = num_bytes - self._sizes.get(block, 0)
        if change:
            self._sizes[block] = num_bytes
            self._now += change
            self._most = max(self._most, self._now)
            self._allocator.resize(block, num_bytes, 0)

    @property
    def gaps(self) -> int:
        return max(0, self._allocator.reserved - self._most)


def _gaps(parts: Sequence[_Part]) -> int:
    """The bytes in gaps of a stage with these parts, which runs 1F1B."""
    memory = _Memory()
    stage = range(len(parts))

    def run(events: Sequence[tuple[Label, int]], part: int, microbatch: int) -> list[object]:
        """Returns the gradients of weights, which FSDP2 frees when it has added them up."""
        gradients: list[object] = []
        for (kind, number), num_bytes in events:
            if kind == OF_WEIGHTS:
                if num_bytes:
                    gradients.append((part, microbatch, kind, number))
                    memory.resize(gradients[-1], num_bytes)
                continue
            if kind == IN:
                kind, owner = OUT, part - 1
            elif kind == GRADIENT_IN:
                kind, owner = GRADIENT_OUT, part + 1
            else:
                owner = part
            memory.resize((owner, microbatch, kind, number), num_bytes)
        return gradients

    def forward(microbatch: int) -> None:
        for part in stage:
            for index, (gathered, _) in enumerate(parts[part].weights):
                memory.resize((part, "gathered", index), gathered)
            run(parts[part].forward, part, microbatch)

    def backward(microbatch: int) -> None:
        for part in reversed(stage):
            gradients = run(parts[part].backward, part, microbatch)
            weights = parts[part].weights
            for index in range(max(len(weights), len(gradients))):
                if index < len(weights):
                    memory.resize((part, "summed", index), weights[index][1])
                if index < len(gradients) and (weights or microbatch):
                    memory.resize(gradients[index], 0)
        # What the stage has sent.
        memory.resize((len(parts) - 1, microbatch, OUT, 0), 0)
        memory.resize((0, microbatch, GRADIENT_OUT, 0), 0)

    for microbatch in range(UNDER_WAY):
        forward(microbatch)
    for microbatch in range(NUM_MICROBATCHES):
        backward(microbatch)
        if microbatch + UNDER_WAY < NUM_MICROBATCHES:
            forward(microbatch + UNDER_WAY)
    for part in stage:
        memory.resize(("reduced", part), sum(summed for _, summed in parts[part].weights))
        for index in range(len(parts[part].weights)):
            memory.resize((part, "gathered", index), 0)
            memory.resize((part, "summed", index), 0)
        memory.resize(("reduced", part - 1), 0)
    return memory.gaps
