"""The cost of a run: floating-point operations, messages, bytes and collectives."""

from collections import Counter
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the name of the tensor (may be empty), and the mesh axes."""

    kind: str
    label: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        where = f"over {' and '.join(self.axes)}" if self.axes else ""
        return " ".join(part for part in (self.kind, self.label, where) if part)


@dataclass
class Counts:
    """The counts of one device in one run; `+` sums several devices.

    `flops` counts a multiplication and an addition as two; it covers matrix products, convolutions
    and attention. `d2d` is device to device, counted at the sender; `h2d` is host to device and
    `d2h` device to host. `collectives` lists the collectives of the virtual device in order; their
    messages are counted in `d2d`. `torch_collectives` counts the collectives of torch.distributed,
    whose messages are not visible, and `torch_collective_bytes` their payload: the full tensor, not
    the shard (the input of an all-reduce or reduce-scatter, the output of an all-gather).
    """

    flops: int = 0
    d2d_messages: int = 0
    d2d_bytes: int = 0
    h2d_messages: int = 0
    h2d_bytes: int = 0
    d2h_messages: int = 0
    d2h_bytes: int = 0
    collectives: list[Collective] = field(default_factory=list)
    torch_collectives: Counter[str] = field(default_factory=Counter)
    torch_collective_bytes: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Counts") -> "Counts":
        """The sum; `collectives` are those of the first, since all devices of a group take part."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Counts(**{**sums, "collectives": self.collectives or other.collectives})

    def count_send(self, tensor: torch.Tensor) -> None:
        self.d2d_messages += 1
        self.d2d_bytes += tensor.nbytes

    def count_h2d(self, value: Any) -> None:
        """Count every tensor in `value` as sent from host to device."""
        tensors = tensors_in(value)
        self.h2d_messages += len(tensors)
        self.h2d_bytes += sum(tensor.nbytes for tensor in tensors)

    def count_d2h(self, value: Any) -> None:
        """Count every tensor in `value` as sent from device to host."""
        tensors = tensors_in(value)
        self.d2h_messages += len(tensors)
        self.d2h_bytes += sum(tensor.nbytes for tensor in tensors)


# The names under which torch dispatches its collectives: list, tensor and functional forms.
KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "barrier": "barrier",
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif is_dataclass(value):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]
