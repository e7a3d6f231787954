"""The messages of one real step: which rank sends what to whom, in which module.

The ranks are threads of this process (titanlite.ranks.threads), whose exchange tells of every
collective and message. The record is one of the lab's, which draws it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from titanlite.config import ResolvedJob
from titanlite.job import Job, build_job
from titanlite.modules.names import canonical_name
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.report import Call
from titanlite.ranks.settings import ignore_warnings
from titanlite.ranks.thread_group import Ranks, Tensors
from titanlite.ranks.threads import thread_world
from titanlite.ranks.turns import current_rank, is_rank
from titanlite.ranks.world import open_world
from titanlite.tools.lab import record
from titanlite.tools.lab.pictures import Record

# The key of a node of autograd's graph under which its module's name is kept.
MODULE = "titanlite.module"
# How many frames above a collective are searched for the unit of FSDP that called it.
MOST_FRAMES = 30


def record_step(job: ResolvedJob, step: int) -> Record:
    """Train until the `step`-th step on ranks that are threads, and record that step."""
    return Record(spawn(_on_rank, job.dims.world_size, job, step, threads=True))


def _on_rank(place: Place, resolved: ResolvedJob, step: int) -> list[record.Event]:
    with open_world(place) as world:
        job = build_job(resolved, world)
        for number in range(1, step):
            job.step(number)
        exchange = thread_world().exchange
        if not isinstance(exchange.listener, StepListener):
            exchange.listener = StepListener(world.size)
        listener = exchange.listener
        with world.watch.patched(listener.naming), listener.recording(job):
            job.step(step)
        return listener.events[world.rank]


class StepListener:
    """Makes the events of each rank, from when it begins to record until it ends."""

    def __init__(self, num_ranks: int) -> None:
        self.events: list[list[record.Event]] = [[] for _ in range(num_ranks)]
        self._numbers = itertools.count(1)
        self._clock = itertools.count()
        self._names: dict[int, dict[int, str]] = {}
        # The modules that each rank is in, the innermost last, with the nodes of their inputs.
        self._inside: dict[int, list[tuple[str, set[Any]]]] = {}

    @contextlib.contextmanager
    def recording(self, job: Job) -> Iterator[None]:
        """Record what this thread's rank does inside."""
        rank = current_rank()
        self._names[rank] = {
            id(module): canonical_name(name)
            for part in job.parts
            for name, module in part.named_modules()
        }
        self._inside[rank] = []
        yield
        del self._names[rank]
        self._add(rank, record.RETURN, next(self._numbers))

    # What the exchange calls.

    def collective(
        self, rank: int, call: Call, ranks: Ranks, tensors: Tensors, results: Tensors
    ) -> int:
        if rank not in self._names or len(ranks) == 1:
            return 0
        number = next(self._numbers)
        operation = call.operation.partition(" ")[0]
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else (call.num_elements,)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        info = record.TensorInfo(call.dtype, shape, num_bytes) if tensors else record.NO_TENSOR
        function = call.site.rpartition(" in ")[2]
        label = self._module(rank) or function.strip("_").replace("_", " ")
        self._add(
            rank, record.COLLECTIVE, number, operation, label, ranks, call.group, info, call.site
        )
        return number

    def message(self, rank: int, peer: int, tensor: Tensor, channel: str, *, is_send: bool) -> int:
        if rank not in self._names:
            return 0
        number = next(self._numbers)
        kind = record.SEND if is_send else record.RECEIVE
        where = self._module(rank), (peer,), channel
        self._add(rank, kind, number, "", *where, record.TensorInfo.of(tensor))
        return number

    @contextlib.contextmanager
    def waits(self, number: int) -> Iterator[None]:
        rank = current_rank()
        is_recorded = number > 0 and rank in self._names
        if is_recorded:
            self._add(rank, record.WAIT, number)
        yield
        if is_recorded:
            self._add(rank, record.RESUME, number)

    def _add(self, rank: int, kind: str, number: int, *rest: Any) -> None:
        self.events[rank].append(record.Event(rank, next(self._clock), kind, number, *rest))

    # Which module a call is made in.

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Follow the modules that ranks call, and mark what autograd keeps for the way back."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        ignore_warnings("Using `torch.compile", UserWarning)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if (name := self._name(module)) is not None:
            # Its own hooks may gather the inputs, which is part of the module.
            self._inside[current_rank()].append((name, set(_nodes(args))))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if (name := self._name(module)) is not None:
            _, inputs = self._inside[current_rank()].pop()
            _mark(_nodes(output), name, until=inputs)

    def _name(self, module: nn.Module) -> str | None:
        """The name of a module of a rank that records; compiled code has none."""
        if torch.compiler.is_compiling() or not is_rank():
            return None
        return self._names.get(current_rank(), {}).get(id(module))

    def _module(self, rank: int) -> str:
        """The module that a rank is in: forwards, or in its part of the backward pass."""
        # FSDP2 may gather one unit while it is in another.
        if unit := _unit_of_fsdp():
            return unit
        if inside := self._inside[rank]:
            return inside[-1][0]
        current: Callable[[], Any] = torch._C._current_autograd_node
        node = current()
        # What is called once a gradient is complete, as buckets are, is of no single module.
        if node is None or type(node).__name__ == "AccumulateGrad":
            return ""
        return node.metadata.get(MODULE, "")


def _nodes(values: Any) -> list[Any]:
    """The nodes of autograd that made the tensors in `values`."""
    if isinstance(values, Tensor):
        return [values.grad_fn] if values.grad_fn is not None else []
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return [node for value in values for node in _nodes(value)]
    return []


def _mark(nodes: list[Any], name: str, until: set[Any]) -> None:
    """Give the name to these nodes and those before them, where no inner module has named them."""
    seen = set(until)
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            node.metadata.setdefault(MODULE, name)
            nodes += [before for before, _ in node.next_functions if before is not None]


def _unit_of_fsdp() -> str:
    """The unit for which FSDP2 has called a collective; "" if it was not FSDP2."""
    frame: Any = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return ""
        name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
        if name:
            return canonical_name(name)
        frame = frame.f_back
    return ""
