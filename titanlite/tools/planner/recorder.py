"""Record what a step does: a dispatch mode below autograd and DTensor.

The tensors are fake, so an operator only computes shapes. The body of titanlite's own operators
(rings) is run, so that their messages and memory are recorded too.
"""

import bisect
import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._ops import HigherOrderOperator
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from titanlite.modules.names import canonical_name
from titanlite.tools.planner import operators
from titanlite.tools.planner.events import Allocation, Communication, Event, Operator, Site, Wait
from titanlite.tools.planner.scratch import CPU, Scratch, num_bytes

PEER_AT = 2
WAIT = "_c10d_functional::wait_tensor"
# Makes a tensor that is waited for at its first use.
WRAP = "_c10d_functional::_wrap_tensor_autograd"
# Operators that touch no data.
FREE = ("aten::detach", "aten::empty", "aten::new_empty", "aten::empty_strided", "aten::alias")
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
# Namespaces of operators that only ask a tensor something, or that mark a range for a profiler.
NO_WORK = ("prim::", "profiler::")
OWN_NAMESPACE = "titanlite"
# The methods of a process group that return a Work, by the names of all torch versions.
METHODS = (
    *("send", "recv", "allreduce", "broadcast", "allgather", "alltoall"),
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall_base", "all_to_all_single"),
)


class StepRecorder(TorchDispatchMode):
    """Records operators, communication and memory of this process, while it is active.

    `axes` maps the name of each process group, or else its ranks, to its axes. With `is_fake` the
    tensors are fake, and a scalar that is read has an arbitrary value. `scratch` is the table of
    what kernels and communication allocate inside themselves, on `num_threads` threads of a
    `device_type`.
    """

    def __init__(
        self,
        axes: Mapping[str | tuple[int, ...], tuple[str, ...]],
        *,
        is_fake: bool = True,
        scratch: Scratch = CPU,
        num_threads: int = 1,
        device_type: str = "cpu",
    ) -> None:
        super().__init__()
        self._is_fake, self._scratch, self._num_threads = is_fake, scratch, num_threads
        self.events: list[Event] = []
        self.blocks: dict[int, int] = {}
        """Storage -> its block number, while it exists."""
        self.sizes: dict[int, int] = {}
        self.gathered: set[int] = set()
        self.buffers: set[int] = set()
        self._axes, self._next, self._number = axes, 0, 0
        self._unwaited: dict[int, tuple[int, Any]] = {}
        self._issued: list[tuple[int, Any]] = []
        self._modules: list[str] = []
        self._gathered_for: list[str] = []
        self._spans: list[tuple[int, str]] = [(0, "")]
        self.phase = "other"
        self._is_paused = False
        self._device = torch.get_device_module(device_type)
        self._streams = {self._device.current_stream(): 0} if scratch.has_streams else {}

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, since Dynamo does not compile what runs under other modes."""
        return True

    # The place of an event

    @contextlib.contextmanager
    def watching(self, parts: list[nn.Module]) -> Iterator[None]:
        """Inside, the place of events in these modules, and FSDP's resizing, are recorded."""
        handles = []
        names = {}
        for part in parts:
            compiled: tuple[str, ...] = ()
            for name, module in part.named_modules():
                names[module] = canonical_name(name)
                if name.startswith(compiled) and compiled:
                    # Dynamo would have to trace these hooks.
                    continue
                handles += self._hook(module, names[module])
                if isinstance(module, OptimizedModule):
                    compiled += (f"{name}.",)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note_storage(storage)
            self.gathered.add(self.blocks[storage._cdata])
            return result

        get_rng_state = torch.get_rng_state

        def noted_rng_state() -> Tensor:
            # No operator returns a state, which activation checkpointing keeps.
            state = get_rng_state()
            if self._scratch.has_rng_state:
                self.note([state])
            return state

        def of_its_modules(method: Any) -> Any:
            """A method of FSDP2's groups, which may run while another module does."""

            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                self._gathered_for.append(names.get(group.modules[0], ""))
                try:
                    return method(group, *args, **kwargs)
                finally:
                    self._gathered_for.pop()

            return call

        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:
            # DTensor runs an operator on fake tensors of the whole shape, only for its shape.
            before, self._is_paused = self._is_paused, True
            try:
                return propagate(*args)
            finally:
                self._is_paused = before

        with contextlib.ExitStack() as stack:
            stack.enter_context(
                patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)
            )
            for name in ("unshard", "wait_for_unshard", "post_backward"):
                method = of_its_modules(getattr(FSDPParamGroup, name))
                stack.enter_context(patch.object(FSDPParamGroup, name, method))
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
            stack.enter_context(patch.object(torch, "get_rng_state", noted_rng_state))
            for name in METHODS:
                if hasattr(dist.ProcessGroup, name):
                    method = self._call(getattr(dist.ProcessGroup, name))
                    stack.enter_context(patch.object(dist.ProcessGroup, name, method))
            stack.enter_context(self)
            yield
        for handle in handles:
            handle.remove()

    def _call(self, method: Any) -> Any:
        """A method of process groups; its works hold tensors, as real ones do, and record waits."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._issued.clear()
            work = method(*args, **kwargs)
            held = [(args, kwargs), *(held for _, held in self._issued)]
            numbers = [number for number, _ in self._issued]
            self._issued.clear()
            return _Work(self, work, held, numbers)

        return call

    def _hook(self, module: nn.Module, name: str) -> list[Any]:
        def enter(*_: Any) -> None:
            self._modules.append(name)
            self._mark(name)

        def leave(*_: Any) -> None:
            if name in self._modules:
                while self._modules.pop() != name:
                    pass
            self._mark(self._modules[-1] if self._modules else "")

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _mark(self, name: str) -> None:
        """Autograd nodes made from now on belong to `name`."""
        number = torch.autograd._get_sequence_nr()
        if self._spans[-1][0] == number:
            self._spans.pop()
        self._spans.append((number, name))

    def place(self) -> Site:
        """The module and the phase of what happens now."""
        if torch._C._current_graph_task_id() == -1:
            return Site(self._modules[-1] if self._modules else "", self.phase)
        if self._modules:
            return Site(self._modules[-1], "recomputation")
        node = torch._C._current_autograd_node()
        if node is None:
            return Site("", "backward")
        index = bisect.bisect_right(self._spans, node._sequence_nr(), key=lambda span: span[0])
        return Site(self._spans[index - 1][1], "backward")

    # Operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return function(*args, **kwargs)
        if isinstance(function, HigherOrderOperator):
            if self._is_fake:
                return self._call_with_rng_state(function, args, kwargs)
            return function(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # DTensor and other wrappers handle it first; this mode then sees what they call.
            return NotImplemented
        if self._is_fake and function in READS:
            return _some_value(args[0])
        name = function._schema.name
        if name.startswith(f"{OWN_NAMESPACE}::"):
            with self:
                return operators.body_of(function)(*args, **kwargs)
        if name == WRAP:
            return AsyncCollectiveTensor(*args)
        if name == WAIT:
            # The real operator returns its input; its fake kernel a new tensor.
            result = args[0] if self._is_fake else function(*args, **kwargs)
            block = self.blocks.get(args[0].untyped_storage()._cdata)
            if block in self._unwaited:
                self._add_waits([self._unwaited.pop(block)[0]])
            return result
        result = function(*args, **kwargs)
        place = self.place()
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            self._note_storage(output.untyped_storage())
        if name in operators.COLLECTIVES:
            self._add_collective(name, args, result, place)
        elif not (function.is_view or name in FREE or name.startswith(NO_WORK)):
            self._add_operator(name, args, kwargs, result, outputs, place, function)
            if name in self._scratch.kernels:
                self._allocate(self._scratch.kernels[name](args, self._num_threads))
        return result

    def _call_with_rng_state(self, function: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """An operator of a compiled graph that saves a random state, or that runs with one.

        They are in graphs with recomputation. Without a rule of its own, another higher-order
        operator runs as one call.
        """
        if function is run_and_save_rng_state:
            state, (operator, *rest) = torch.get_rng_state(), args
        elif function is run_with_rng_state:
            state, (_, operator, *rest) = torch.get_rng_state(), args
        else:
            return function(*args, **kwargs)
        with self:
            result = operator(*rest, **kwargs)
        return (state, result) if function is run_and_save_rng_state else result

    def _add_operator(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        result: Any,
        outputs: list[Tensor],
        place: Site,
        function: Any,
    ) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        flops = operators.flops_of(name, function, args, kwargs, result)
        self.events.append(
            Operator(
                name,
                flops,
                sum(num_bytes(tensor) for tensor in inputs),
                sum(num_bytes(tensor) for tensor in outputs) or operators.bytes_of_mutated(args),
                place,
                str((outputs or inputs)[0].dtype).removeprefix("torch.")
                if outputs or inputs
                else "",
                operators.shape_of(name, args, kwargs),
                causal=operators.causal_of(name, args, kwargs),
                is_strided=any(map(operators.has_gaps, inputs)),
            )
        )

    def _add_collective(self, name: str, args: Any, result: Any, place: Site) -> None:
        kind, whole_at, group_at = operators.COLLECTIVES[name]
        whole = result if whole_at == -1 else args[whole_at]
        parts = whole if isinstance(whole, list) else [whole]
        whole = parts[0]
        group = args[group_at]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        else:
            group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        is_world_sum = kind == "all_reduce" and whole.dtype.itemsize == 8 and not whole.ndim > 1
        axis = (
            "world"
            if is_world_sum and len(ranks) == dist.get_world_size()
            else operators.axis_of(
                name, kind, self._axes.get(group.group_name) or self._axes.get(ranks, ())
            )
        )
        self._number += 1
        peer = args[PEER_AT] if kind in ("send", "receive") else -1
        if self._gathered_for and not isinstance(result, Tensor):
            place = place._replace(module=self._gathered_for[-1])
        size = sum(map(num_bytes, parts))
        held: list[Any] = [self._allocate(self._scratch.copies.get(kind, 0) * size)]
        if held[0] is not None:
            self.buffers.add(held[0].block)
        self.events.append(Communication(kind, axis, size, len(ranks), place, self._number, peer))
        if isinstance(result, Tensor):
            if kind in self._scratch.holds_input:
                held.append(args[0])
            self._unwaited[self.blocks[result.untyped_storage()._cdata]] = self._number, held
        else:
            self._issued.append((self._number, held))
            for tensor in (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
                self._note_storage(tensor.untyped_storage())
                self.buffers.add(self.blocks[tensor.untyped_storage()._cdata])

    def _add_waits(self, numbers: Iterable[int]) -> None:
        self.events += [Wait(number) for number in numbers]

    # Memory

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that is new, or that has another size now."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.blocks:
            self._next += 1
            self.blocks[key] = block = self._next
            self.sizes[block] = 0
            weakref.finalize(storage, self._forget, key, block)
        block = self.blocks[key]
        if self.sizes[block] != size:
            self.sizes[block] = size
            self.events.append(Allocation(block, size, self.place(), self._stream()))

    def _stream(self) -> int:
        """The number of the stream that allocates now."""
        if not self._streams:
            return 0
        return self._streams.setdefault(self._device.current_stream(), len(self._streams))

    def _forget(self, key: int, block: int) -> None:
        if self.sizes.get(block):
            self.events.append(Allocation(block, 0, self.place()))
        self.sizes[block] = 0
        if self.blocks.get(key) == block:
            del self.blocks[key]

    def _allocate(self, size: int) -> "_Block | None":
        """Record memory that exists as long as the object that is returned; None for no bytes."""
        return _Block(self, size) if size else None

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Record the memory of tensors that no operator has returned."""
        for tensor in tensors:
            self._note_storage(tensor.untyped_storage())

    def blocks_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The blocks of these tensors' storages."""
        return {
            self.blocks[key]
            for tensor in tensors
            if (key := tensor.untyped_storage()._cdata) in self.blocks
        }


class _Block:
    """Memory without a tensor."""

    def __init__(self, recorder: StepRecorder, size: int) -> None:
        recorder._next += 1
        self._recorder, self.block = recorder, recorder._next
        recorder.sizes[self.block] = size
        recorder.events.append(Allocation(self.block, size, recorder.place()))

    def __del__(self) -> None:
        self._recorder._forget(-1, self.block)


class _Work(dist.Work):
    """A communication in flight: what it holds, and what a wait for it records."""

    def __init__(self, recorder: StepRecorder, work: Any, held: Any, numbers: list[int]) -> None:
        super().__init__()
        self._recorder, self._work = recorder, work
        self._held, self._numbers = held, numbers

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._recorder._add_waits(self._numbers)
        self._numbers = []
        if self._recorder._scratch.frees_at_wait:
            self._held = None
        return result

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


def _some_value(tensor: Tensor) -> Any:
    """A value for a fake scalar: no branch of a step depends on it if all is well."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
