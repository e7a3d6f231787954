"""Run two steps of jobs on fake CUDA tensors, in a process for each: a job's arguments a line.

A line of JSON answers each: what went wrong and in which line of code, and the lines of the
second step in which the host waits for the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device import pretend
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map_only

from titanlite.config import ResolvedJob, read_job, resolve_job
from titanlite.job import build_job
from titanlite.modules.experts import dispatch, products
from titanlite.modules.experts.dispatch import host_sizes
from titanlite.ranks.settings import ignore_warnings, own_settings
from titanlite.tools.planner.fake_world import fake_builders, fake_world, stand_ins
from titanlite.tools.planner.operators import body_of
from titanlite.training.initial_weights import move_buffers

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
SCALARS = (aten._local_scalar_dense.default, aten.item.default)
COPIES = (aten._to_copy.default, aten.copy_.default)


class Device(TorchDispatchMode):
    """Makes fake tensors of what is put on "cuda", and notes each line that waits for the device.

    That is one that reads a scalar, which is 1, or copies to or from the host unless it is
    `non_blocking`. An operator on tensors of both devices raises an error.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.waits: list[str] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, since Dynamo does not compile what runs under other modes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the operators on what it wraps come here
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor finds shapes with fake tensors of its own
        if func.namespace == "titanlite":
            with self:
                return body_of(func)(*args, **kwargs)
        if func in SCALARS and isinstance(args[0], FakeTensor):
            if args[0].device.type == "cuda":
                self._note()
            return torch.ones((), dtype=args[0].dtype).item()
        is_put = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        faked = partial(tree_map_only, Tensor, self._as_fake) if is_put else lambda same: same
        with self._mode if is_put else contextlib.nullcontext():
            result = func(*faked(args), **faked(kwargs))
        if func in COPIES and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            ends = {one.device.type for one in (result, *args[:2]) if isinstance(one, Tensor)}
            if len(ends) > 1:
                self._note()
        return result

    def sizes(self, total: int, *counts: Tensor) -> list[list[int]]:
        """host_sizes, which does not read fake tensors."""
        self._note()
        return host_sizes(total, *counts)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _note(self) -> None:
        line = line_of(traceback.extract_stack())
        # A list is read at once; here, number by number.
        if [line] != self.waits[-1:]:
            self.waits.append(line)


def line_of(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the project: "titanlite/job.py:146 in step"."""
    for frame in reversed(list(frames)):
        path = Path(frame.filename)
        is_own = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if is_own and path.parent != Path(__file__).parent:
            return f"{path.relative_to(ROOT)}:{frame.lineno} in {frame.name}"
    return ""


def waits_of(resolved: ResolvedJob, rank: int) -> list[str]:
    """The lines of the second step of `rank` that wait for the device."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_settings())
        ignore_warnings()
        world = stack.enter_context(fake_world(rank, resolved.dims.world_size, "cuda"))
        stack.enter_context(stand_ins("cuda"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        device = stack.enter_context(Device(mode))
        for module in (dispatch, products):
            stack.enter_context(patch.object(module, "host_sizes", device.sizes))
        is_offloaded = resolved.config.training.enable_cpu_offload
        of_parameters = torch.device("cpu") if is_offloaded else world.device
        builders = fake_builders(mode, of_parameters)

        def materialize(parts: Sequence[nn.Module]) -> None:
            assert builders.materialize is not None
            builders.materialize(parts)
            for part in parts:
                move_buffers(part, world.device)

        job = build_job(resolved, world, replace(builders, materialize=materialize))
        job.step()
        device.waits.clear()
        job.step()
        return device.waits


def answer(arguments: Sequence[str], rank: int, resolved: ResolvedJob) -> dict[str, Any]:
    """The lines that wait in a step of one rank, or what went wrong."""
    found: dict[str, Any] = {"job": " ".join(arguments), "rank": rank, "waits": [], "error": ""}
    try:
        found["waits"] = waits_of(resolved, rank)
    except Exception as error:  # any may be what this looks for
        line = line_of(traceback.extract_tb(error.__traceback__))
        found["error"] = f"{line}: {type(error).__name__}: {str(error)[:300]}"
        if "--trace" in sys.argv:
            traceback.print_exc()
    return found


def main() -> None:
    """Answer each line of stdin, for the first rank of each pipeline stage."""
    pretend()
    for line in sys.stdin:
        arguments = line.split()
        resolved = resolve_job(read_job([*arguments, "--job.device=cuda"]).require())
        for stage in range(resolved.dims.pp):
            # DTensor keeps process groups of a world that is gone.
            if not (child := os.fork()):
                rank = resolved.dims.rank(pp=stage)
                print(json.dumps(answer(arguments, rank, resolved)), flush=True)
                os._exit(0)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
