"""What a device can do, answered in one place: a plan answers for a device that is not here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class DeviceSupport:
    """What the devices of this machine can do."""

    def capability(self, device: torch.device | str) -> tuple[int, int]:
        """The compute capability of a GPU; (0, 0) of a CPU."""
        is_gpu = torch.device(device).type == "cuda"
        return torch.cuda.get_device_capability() if is_gpu else (0, 0)

    def kernels(self, kernels: Sequence[Any]) -> Sequence[Any]:
        """The attention kernels to choose from, or others in their place."""
        return kernels

    def chunks(self, size: int, tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
        """`size` rows of the tensors at a time; the same is done with each chunk."""
        # No generator: in a backward pass torch 2.14 does not compile one.
        return list(zip(*(one.split(size) for one in tensors), strict=True))


_support = [DeviceSupport()]


def support() -> DeviceSupport:
    """What the devices that the code is for can do."""
    return _support[-1]


@contextlib.contextmanager
def supported_as(other: DeviceSupport) -> Iterator[None]:
    """Inside, `other` says what devices can do."""
    _support.append(other)
    try:
        yield
    finally:
        _support.remove(other)
