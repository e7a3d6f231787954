"""Elementwise operators joined as a compiler joins them; torch-free."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from titanlite.tools.planner.cost import FREE, MEMORY_BOUND, rule_of
from titanlite.tools.planner.events import Allocation, Event, Operator

FUSED = "fused"
"""The name of an operator that `fuse` has made."""
# What a compiler does not join with its neighbours.
UNFUSED_WORDS = ("embedding", "index_put", "nll_loss", "sort", "_foreach", "_fused", "copy_in")
UNFUSED_NAMESPACES = ("fsdp", "prim", "profiler")


def fuse(events: Sequence[Event]) -> list[Event]:
    """The events with each chain of elementwise operators as one operator.

    A chain is of one phase and one block, without a product, attention or communication between.
    What an operator writes and the next one reads stays on the chip, so it counts neither as
    written nor as read. Values that the backward pass needs are computed again there.
    """
    found: list[Event] = []
    chain: list[Operator] = []
    held: list[Event] = []

    def close() -> None:
        if len(chain) > 1:
            found.append(_join(chain))
        else:
            found.extend(chain)
        found.extend(held)
        chain.clear()
        held.clear()

    for event in events:
        if isinstance(event, Allocation):
            (held if chain else found).append(event)
            continue
        if isinstance(event, Operator):
            if rule_of(event.name).kind == FREE:
                continue
            if is_fusible(event):
                if chain and _block(chain[-1]) != _block(event):
                    close()
                chain.append(event)
                continue
        close()
        found.append(event)
    close()
    return found


def is_fusible(operator: Operator) -> bool:
    """Whether a compiler joins the operator with its neighbours."""
    if rule_of(operator.name).kind != MEMORY_BOUND:
        return False
    namespace, _, name = operator.name.partition("::")
    return namespace not in UNFUSED_NAMESPACES and not any(word in name for word in UNFUSED_WORDS)


def _block(operator: Operator) -> tuple[str, str]:
    """The phase and the first two parts of the module's name: layers.0."""
    return operator.place.phase, ".".join(operator.place.module.split(".")[:2])


def _join(chain: Sequence[Operator]) -> Operator:
    read = chain[0].bytes_read
    written = 0
    for before, after in itertools.pairwise(chain):
        if after.bytes_read >= before.bytes_written:
            read += after.bytes_read - before.bytes_written
        else:
            read += after.bytes_read
            written += before.bytes_written
    largest = max(chain, key=lambda one: one.bytes_written)
    return replace(
        largest, name=FUSED, bytes_read=read, bytes_written=written + chain[-1].bytes_written
    )
