"""Record what a step does: a dispatch mode below autograd and DTensor.

The tensors are fake, so an operator only computes shapes. The body of titanlite's own operators
(rings) is run, so that their messages and memory are recorded too.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titanlite.attention import rotation
from titanlite.names import canonical_name
from titanlite.plan.events import Communication, Event, Memory, Operator, Place, Wait

# Operator -> kind, and the positions of the whole tensor (-1: the result), of the group and, for
# P2P messages, of the peer among its arguments.
COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1, 2),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, 3),
    "_c10d_functional::all_reduce": ("all_reduce", 0, 2),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, 3),
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::broadcast_": ("broadcast", 0, 1),
    "c10d::send": ("send", 0, 1),
    "c10d::recv_": ("receive", 0, 1),
}
PEER_AT = 2
WAIT = "_c10d_functional::wait_tensor"
# Operators that touch no data.
FREE = ("aten::detach", "aten::empty", "aten::new_empty", "aten::empty_strided", "aten::alias")
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
# Namespaces of operators that only ask a tensor something, or that mark a range for a profiler.
NO_WORK = ("prim::", "profiler::")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
# Attention kernels: forward and backward products, each of 2 B H T T E operations.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (2, 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (5, 1),
}
OWN_NAMESPACE = "titanlite"


class Recorder(TorchDispatchMode):
    """Records operators, communication and memory of this process, while it is active.

    `axes` maps the ranks of each process group to its axis. With `is_fake` the tensors are fake,
    and a scalar that is read has an arbitrary value.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str], *, is_fake: bool = True) -> None:
        super().__init__()
        self._is_fake = is_fake
        self.events: list[Event] = []
        self.blocks: dict[int, int] = {}
        """Storage -> its block number, while it exists."""
        self.sizes: dict[int, int] = {}
        self.gathered: set[int] = set()
        self.buffers: set[int] = set()
        self._axes, self._next, self._number = axes, 0, 0
        self._unwaited: dict[int, tuple[int, Any]] = {}
        self._modules: list[str] = []
        self._spans: list[tuple[int, str]] = [(0, "")]
        self.phase = "other"

    # The place of an event

    @contextlib.contextmanager
    def watching(self, parts: list[nn.Module]) -> Iterator[None]:
        """Inside, the place of events in these modules, and FSDP's resizing, are recorded."""
        handles = []
        for part in parts:
            for name, module in part.named_modules():
                handles += self._hook(module, canonical_name(name))
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._note_storage(storage)
            self.gathered.add(self.blocks[storage._cdata])
            return result

        with (
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(dist, "batch_isend_irecv", self._post(dist.batch_isend_irecv)),
            patch.object(rotation, "_all_gather", self._call(rotation._all_gather)),
            self,
        ):
            yield
        for handle in handles:
            handle.remove()

    def _post(self, batch_isend_irecv: Any) -> Any:
        """The same function, with works that hold their tensors and record waits.

        A real work holds its tensors until it is waited for; a fake one does not.
        """

        def post(operations: list[dist.P2POp]) -> list[Any]:
            first = self._number
            works = batch_isend_irecv(operations)
            tensors = [operation.tensor for operation in operations]
            numbers = list(range(first + 1, self._number + 1))
            if len(works) == len(tensors) == len(numbers):
                return [_Work(self, *one) for one in zip(works, tensors, numbers, strict=True)]
            return [_Work(self, work, tensors, *numbers) for work in works]

        return post

    def _call(self, collective: Any) -> Any:
        """The same for an asynchronous collective."""

        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            return None if work is None else _Work(self, work, args, self._number)

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

    def place(self) -> Place:
        """The module and the phase of what happens now."""
        if torch._C._current_graph_task_id() == -1:
            return Place(self._modules[-1] if self._modules else "", self.phase)
        if self._modules:
            return Place(self._modules[-1], "recomputation")
        node = torch._C._current_autograd_node()
        if node is None:
            return Place("", "backward")
        index = bisect.bisect_right(self._spans, node._sequence_nr(), key=lambda span: span[0])
        return Place(self._spans[index - 1][1], "backward")

    # Operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor handles it first; this mode then sees what it calls.
            return NotImplemented
        if self._is_fake and function in READS:
            return _some_value(args[0])
        name = function._schema.name
        if name.startswith(f"{OWN_NAMESPACE}::"):
            with self:
                return _body_of(function)(*args, **kwargs)
        result = function(*args, **kwargs)
        place = self.place()
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            self._note_storage(output.untyped_storage())
        if name in COLLECTIVES:
            self._add_collective(name, args, result, place)
        elif name == WAIT:
            block = self.blocks.get(args[0].untyped_storage()._cdata)
            if block in self._unwaited:
                number, _ = self._unwaited.pop(block)
                self.events.append(Wait(number))
        elif not (function.is_view or name in FREE or name.startswith(NO_WORK)):
            self._add_operator(name, args, kwargs, result, outputs, place, function)
        return result

    def _add_operator(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        result: Any,
        outputs: list[Tensor],
        place: Place,
        function: Any,
    ) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        flops = _flops_of(name, function, args, kwargs, result)
        self.events.append(
            Operator(
                name,
                flops,
                sum(_bytes_of(tensor) for tensor in inputs),
                sum(_bytes_of(tensor) for tensor in outputs) or _bytes_of_mutated(args),
                place,
                str((outputs or inputs)[0].dtype).removeprefix("torch.")
                if outputs or inputs
                else "",
                _shape_of(name, args),
            )
        )

    def _add_collective(self, name: str, args: Any, result: Any, place: Place) -> None:
        kind, whole_at, group_at = COLLECTIVES[name]
        whole = result if whole_at == -1 else args[whole_at]
        whole = whole[0] if isinstance(whole, list) else whole
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
            else self._axes.get(ranks, "none")
        )
        self._number += 1
        peer = args[PEER_AT] if kind in ("send", "receive") else -1
        self.events.append(
            Communication(kind, axis, _bytes_of(whole), len(ranks), place, self._number, peer)
        )
        if isinstance(result, Tensor):
            # A real work holds its input until it is waited for.
            self._unwaited[self.blocks[result.untyped_storage()._cdata]] = self._number, args[0]
        else:
            for tensor in (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
                self._note_storage(tensor.untyped_storage())
                self.buffers.add(self.blocks[tensor.untyped_storage()._cdata])

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
            self.events.append(Memory(block, size, self.place()))

    def _forget(self, key: int, block: int) -> None:
        if self.sizes.get(block):
            self.events.append(Memory(block, 0, self.place()))
        self.sizes[block] = 0
        if self.blocks.get(key) == block:
            del self.blocks[key]

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


class _Work:
    """A communication in flight: its tensors, and what a wait for it records."""

    def __init__(self, recorder: Recorder, work: Any, tensors: Any, *numbers: int) -> None:
        self._recorder, self._work, self._tensors = recorder, work, tensors
        self._numbers = numbers

    def wait(self) -> Any:
        result = self._work.wait()
        self._recorder.events += [Wait(number) for number in self._numbers]
        self._tensors, self._numbers = None, ()
        return result

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _some_value(tensor: Tensor) -> Any:
    """A value for a fake scalar: no branch of a step depends on it if all is well."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _body_of(function: Any) -> Callable[..., Any]:
    """The Python function of one of titanlite's own operators."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[function._schema.name]._init_fn


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of_mutated(args: Any) -> int:
    """Operators without a result write their first list of tensors."""
    first = args[0] if args else []
    return sum(_bytes_of(leaf) for leaf in tree_leaves(first) if isinstance(leaf, Tensor))


def _flops_of(name: str, function: Any, args: Any, kwargs: Any, result: Any) -> int:
    if name in ATTENTION:
        num_products, at = ATTENTION[name]
        q, k = args[at], args[at + 1]
        return 2 * num_products * q.numel() * k.size(2)
    formula = flop_registry.get(function._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def _shape_of(name: str, args: Any) -> tuple[int, ...]:
    """(batch, m, n, k) of a matrix product."""
    if name not in PRODUCTS:
        return ()
    a, b = args[-2:] if name in ("aten::mm", "aten::bmm") else args[1:3]
    if name == "aten::_scaled_mm":
        a, b = args[:2]
    batch = a.size(0) if a.ndim == 3 else 1
    return batch, a.size(-2), b.size(-1), a.size(-1)
