"""Trace CPU offload of a GPU's job, where the memory of the device and of its host are one.

FSDP2 copies each shard to the device before it is gathered, and each reduced gradient back
(CPUOffloadPolicy). On CPU tensors these copies do nothing. The recorder makes them, and follows
which blocks of memory and which operators are the host's.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from titanlite.parallelize.float8.gather import Float8Shard
from titanlite.tools.planner.events import HOST_LINK, TO_DEVICE, TO_HOST, Communication, Operator
from titanlite.tools.planner.recorder import StepRecorder

# The methods of FSDP2's groups that copy, and where to.
COPYING = {"unshard": TO_DEVICE, "wait_for_unshard": TO_DEVICE, "post_backward": TO_HOST}


class OffloadRecorder(StepRecorder):
    """Records a job whose parameters, gradients and optimizer state are on the host.

    `on_host` has the blocks in the host's memory. `start` is called with the tensors that are there
    before the step; results of operators on them are there, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_host: set[int] = set()

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Note the tensors that are on the host."""
        self.on_host.update(self.blocks_of(tensors))

    @contextlib.contextmanager
    def watching(self, parts: list[nn.Module]) -> Iterator[None]:
        """As Recorder.watching; inside, FSDP2's copies are made and recorded, too."""

        def copying(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with _Copies(self, kind):
                    return method(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for name, kind in COPYING.items():
                method = copying(getattr(FSDPParamGroup, name), kind)
                stack.enter_context(patch.object(FSDPParamGroup, name, method))
            stack.enter_context(super().watching(parts))
            yield

    def copied(self, tensor: Tensor, kind: str) -> Tensor:
        """A copy of a tensor on the other side."""
        self._is_paused = True
        copy = torch.empty_like(tensor)
        self._is_paused = False
        self.note([copy])
        if kind == TO_HOST:
            self.on_host |= self.blocks_of([copy])
        self._number += 1
        self.events.append(
            Communication(
                kind,
                HOST_LINK,
                tensor.numel() * tensor.element_size(),
                1,
                self.place()._replace(module=self._gathered_for[-1]),
                self._number,
            )
        )
        return copy

    def _add_operator(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        result: Any,
        outputs: list[Tensor],
        place: Any,
        function: Any,
    ) -> None:
        super()._add_operator(name, args, kwargs, result, outputs, place, function)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.blocks_of(inputs) & self.on_host:
            operator = self.events[-1]
            assert isinstance(operator, Operator)
            self.events[-1] = replace(operator, is_on_host=True)
            self.on_host |= self.blocks_of(outputs)


class _Copies(TorchFunctionMode):
    """Makes the copies of FSDP2: its only calls of Tensor.to that say whether to block."""

    def __init__(self, recorder: OffloadRecorder, kind: str) -> None:
        super().__init__()
        self._recorder, self._kind = recorder, kind

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not torch.Tensor.to or "non_blocking" not in kwargs:
            return function(*args, **kwargs)
        source = args[0]
        copy = self._recorder.copied(source, self._kind)
        is_gathered_in_float8 = hasattr(source, "fsdp_pre_all_gather")
        return copy.as_subclass(Float8Shard) if is_gathered_in_float8 else copy
