"""The gaps that torch's allocator leaves on the main stream in the stages of a pipeline. No torch.

    allocations of the traced parts -> gaps_of_stages -> bytes, for a first, a middle, a last stage

Which blocks of memory are there at once depends on the order of a stage's microbatches, which no
trace of one microbatch has. So the allocations of a small stage are replayed: four blocks, and
three microbatches under way. Fewer blocks can leave larger gaps, above all beside embeddings.
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
    known = _Blocks(runs, order)
    # The last block is the most typical.
    first, block, last = (
        _Part(
            [*known.labelled(at, FORWARD)], [*known.labelled(at, BACKWARD)], weights.get(name, ())
        )
        for at, name in [(0, order[0]), *[*enumerate(order)][-2:]]
    )
    blocks = [block] * NUM_BLOCKS
    return _gaps([first, *blocks]), _gaps(blocks), _gaps([*blocks, last])


class _Blocks:
    """The blocks of memory that the passes of the traced parts make: where, and who frees them.

    Small ones are left out: they have segments of their own, of a few MiB.
    """

    def __init__(self, runs: Runs, order: Sequence[str]) -> None:
        self._runs, self._order = runs, order
        self._made: dict[int, tuple[int, str]] = {}
        self._freed: dict[int, int] = {}
        self._of_weights: set[int] = set()
        passes = [(place, FORWARD) for place in range(len(order))]
        passes += [(place, BACKWARD) for place in reversed(range(len(order)))]
        for place, phase in passes:
            late: set[int] = set()
            for event in runs[order[place], phase]:
                if isinstance(event, Operator):
                    late.clear()
                elif not isinstance(event, Allocation):
                    continue
                elif event.num_bytes > SMALL:
                    self._made.setdefault(event.block, (place, phase))
                elif not event.num_bytes and event.block in self._made:
                    self._freed[event.block] = place
                    late.add(event.block)
            # Gradients, and what FSDP2 does with them after the last operator is left out.
            self._of_weights |= {b for b in late if self._made[b] == (place, BACKWARD)}
        self._of_weights |= {
            b for b, one in self._made.items() if one[1] == BACKWARD and b not in self._freed
        }

    def labelled(self, at: int, phase: str) -> Iterator[tuple[Label, int]]:
        """The allocations of the part at `at` in one of its passes."""
        for event in self._runs[self._order[at], phase]:
            if not isinstance(event, Allocation) or event.block not in self._made:
                continue
            block, (place, of) = event.block, self._made[event.block]
            if place == at and block in self._of_weights:
                label = OF_WEIGHTS, block
            elif place == at and self._freed.get(block, at) == at:
                label = OWN, block
            elif place == at:
                label = (OUT if of == FORWARD else GRADIENT_OUT), 0
            else:
                label = (IN if of == FORWARD else GRADIENT_IN), 0
            yield label, event.num_bytes


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
        for kind in ("gathered", "summed"):
            for index in range(len(parts[part].weights)):
                memory.resize((part, kind, index), 0)
        memory.resize(("reduced", part - 1), 0)
    return memory.gaps
