"""On a rank: watches a step, and notes what it sends, and what the host reads of the device.

    watch = StepWatch(axes, parameters, inputs)
    with watch.seeing():
        ...  # forward, backward, optimizer
    watch.traffic()

Ranks that are processes show their collectives to a dispatch mode, those that DDP and FSDP2 call in
C++ too. Ranks that are threads have a process group in Python, which tells a listener. Neither sees
into compiled code, so a compiled step is not watched.

Reads are known by their operators. On a CPU, `x.to(...)` is none, since it copies nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from titanlite.modules.shards import local_part
from titanlite.ranks.hang_state import call_site
from titanlite.ranks.report import Call
from titanlite.ranks.thread_group import Ranks, Tensors
from titanlite.ranks.threads import thread_world
from titanlite.ranks.turns import current_rank, is_rank
from titanlite.tools.verify.agreement import dense, digest_of, in_transform
from titanlite.tools.verify.caller_lines import FOREIGN, line_of_caller
from titanlite.tools.verify.contents import Contents, Write, overlap, region
from titanlite.tools.verify.economy import Read, Sent, Traffic

# Smaller tensors are counts, losses and norms: that a step sums one twice says nothing.
LEAST_ELEMENTS = 16
# Larger tensors are not digested.
MOST_DIGESTED_BYTES = 1 << 26
# The key of a mark among the attributes of a storage, which live as long as it does.
MARK = "_titanlite_mark"
THIS_FOLDER = "titanlite/tools/verify/"
FSDP = "torch/distributed/fsdp/"

# An operator's name without its underscores and SUFFIXES -> what it is.
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "recvanysource": "receive",
}
SUFFIXES = ("out", "coalesced", "intotensor", "tensor", "base", "single")
# In c10d their arguments are an output and an input; that of the others is both.
INTO_ANOTHER = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
OF_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
# The kernels of other operators may send, so they run with the mode on.
LEAVES = ("aten", "prim", "prims", "fsdp", *OF_COLLECTIVES)

READS = {
    "_local_scalar_dense": "item()",
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "unique_dim": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "bincount": "bincount()",
    "equal": "equal()",
}
# With a mask as index they first read where it is true.
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# What reads a tensor on a CPU without an operator.
METHODS = {"tolist": "tolist()", "cpu": "cpu()", "numpy": "numpy()"}
# They only write to their first argument.
ONLY_WRITES = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "resize_")
COPIES = ("clone", "_to_copy")


class _Mark:
    """What is known of a storage."""

    __slots__ = ("held", "is_computed", "is_weight", "origin", "received", "token", "writes")

    def __init__(self, token: int) -> None:
        self.token = token
        self.is_computed = self.is_weight = False
        # The tensor of which it is a copy.
        self.origin: Any = None
        # Region -> the index of the call whose result is there and has not been read.
        self.received: dict[tuple[int, int], int] = {}
        # The index of the call whose unchanged result it is.
        self.held = -1
        self.writes: list[Write] = []


class StepWatch:
    """Notes one rank's step. `axes` are its groups by axis; `inputs` are the rank's batches."""

    def __init__(
        self,
        axes: Mapping[str, dist.ProcessGroup],
        parameters: Mapping[str, nn.Parameter],
        inputs: Iterable[Any] = (),
    ) -> None:
        self._axes = {group.group_name: axis for axis, group in axes.items()}
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._num_elements = sum(
            local_part(own).numel() for own in parameters.values() if own.requires_grad
        )
        self._tokens = itertools.count(1)
        self._sent: list[Sent] = []
        self._reads: list[Read] = []
        # Those after which no backward pass has computed anything yet.
        self._late_reads: list[Read] = []
        # The tensors to which each call writes, and how many of them were overwritten unread.
        self._results: dict[int, list[tuple[StorageWeakRef, tuple[int, int], _Mark]]] = {}
        self._overwritten: Counter[int] = Counter()
        # Such a call -> its line, and the one that overwrites what it brings.
        self._lost: dict[int, tuple[str, str]] = {}
        self._arrived: set[int] = set()
        self._lines: dict[int, str] = {}
        self._contents = Contents()
        self._passes: dict[int, int] = {}
        # What was sent how -> the index of that call, and the backward passes before it.
        self._known: dict[Any, tuple[int, int]] = {}
        self._is_paused = False
        for tensor in tree_leaves([list(inputs), list(parameters.values())]):
            if isinstance(tensor, Tensor) and (mark := self._mark(local_part(tensor))) is not None:
                mark.is_computed = True
                mark.is_weight = isinstance(tensor, nn.Parameter)

    @contextlib.contextmanager
    def seeing(self) -> Iterator[StepWatch]:
        """Watch what this rank does inside."""
        with listening(self), _Functions(self), _Operators(self):
            yield self

    def unseen(self, call: Callable[[], None]) -> Callable[[], None]:
        """A function that calls `call`, of which nothing is noted."""

        def called() -> None:
            self._is_paused = True
            with _disable_current_modes():
                call()
            self._is_paused = False

        return called

    def traffic(self) -> Traffic:
        """What was noted."""
        gone = self._overwritten + Counter(
            index
            for index, results in self._results.items()
            for storage, place, mark in results
            if mark.received.get(place) == index and storage.expired()
        )
        # A rank may need some of what it gathers.
        unread = tuple(i for i, results in self._results.items() if gone[i] == len(results))
        lost = tuple(self._lost[index] for index in unread if index in self._lost)
        changed = tuple(self._contents.changed)
        return Traffic(tuple(self._sent), tuple(self._reads), unread, lost, changed)

    @property
    def reads(self) -> tuple[Read, ...]:
        """What the host reads of the device, also after the last backward pass."""
        return (*self._reads, *self._late_reads)

    def operator(self, function: Any, args: Any, kwargs: Any, mode: TorchDispatchMode) -> Any:
        """Call an operator, and note what it does."""
        if self._is_paused:
            return function(*args, **kwargs)
        name, space = function._schema.name.partition("::")[2], function.namespace
        task = torch._C._current_graph_task_id()
        if task >= 0 and task not in self._passes:
            self._passes[task] = len(self._passes) + 1
        if task >= 0 and self._late_reads:
            self._reads += self._late_reads
            self._late_reads = []
        if space not in LEAVES:
            self._use(name, tensors := _tensors(args))
            kernels = _ON_GPU if any(tensor.is_cuda for tensor in tensors) else _ON_CPU
            with mode:
                return function.redispatch(kernels, *args, **kwargs)
        if space in OF_COLLECTIVES and not is_rank():
            kind = _kind_of(name)
            if kind is not None:
                return self._communicate(kind, space, function, args, kwargs)
        tensors = _tensors(args)
        if space == "aten" and (operation := _read_by(name, args)):
            self._read(operation, tensors)
        result = function(*args, **kwargs)
        if function.is_view:
            # Strides and an offset do not fit a copy.
            views = [] if name in ("as_strided", "_reshape_alias") else _tensors([result])
            mark = self._mark(tensors[0], makes=False)
            again = functools.partial(_again, function, args, kwargs)
            self._contents.view(tensors[0], mark.writes if mark else [], views, again)
        elif name != "wait_tensor":
            self._use(name, tensors)
            if task < 0:
                self._follow(name, tensors, result)
        return result

    def method(self, operation: str, tensor: Any) -> None:
        """Note a method that reads a tensor without an operator."""
        if not self._is_paused and isinstance(tensor, Tensor) and not in_transform():
            tensor = local_part(tensor)
            self._read(operation, [tensor])
            self._use(operation, [tensor])

    def begin(self, kind: str, group: Any, inputs: Sequence[Tensor], whole_bytes: int) -> int:
        """Note a call of a collective or message; returns its index, -1 if it is not noted."""
        if self._is_paused:
            return -1
        if kind != "receive":
            self._use(kind, inputs)
        ranks = tuple(dist.get_process_group_ranks(group))
        axis = self._axes.get(group.group_name) or _described(group, ranks)
        index = len(self._sent)
        sent = Sent(kind, axis, ranks, whole_bytes, _what(inputs), _site(), self._pass())
        if len(ranks) > 1 and kind == "all_reduce":
            sent = sent._replace(gradient=self._gradient_in(inputs))
        if len(ranks) > 1 and _is_worth_it(inputs):
            sent = sent._replace(
                digest=_digest(inputs) if kind in ("all_reduce", "all_gather") else "",
                is_again=self._is_again(kind, group, inputs, index),
            )
        self._sent.append(sent)
        return index

    def end(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Note the tensors to which the call writes its result, if not yet, then soon."""
        if index < 0:
            return
        # A broadcast may bring what is there already, and FSDP2 gathers ahead of its needs.
        is_free = self._sent[index].kind in ("broadcast", "send") or any(_frames_of_fsdp())
        for tensor in outputs:
            mark = self._mark(tensor)
            if mark is None:
                continue
            self._overwrite(tensor, mark)
            mark.token, mark.origin, mark.held = next(self._tokens), None, index
            mark.is_computed = True
            if not is_free and _is_worth_it([tensor]):
                self._lines[index], place = line_of_caller(FOREIGN), region(tensor)
                mark.received[place] = index
                storage = StorageWeakRef(tensor.untyped_storage())
                self._results.setdefault(index, []).append((storage, place, mark))

    def _communicate(self, kind: str, space: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator that sends or receives."""
        group = next(found for arg in args if (found := group_of(arg)) is not None)
        if space == "c10d":
            outputs = _tensors(args[:1])
            inputs = _tensors(args[1:2]) if kind in INTO_ANOTHER else outputs
        else:
            inputs, outputs = _tensors(args[:1]), []
        whole = sum(map(_num_bytes, inputs))
        whole *= group.size() if kind in ("all_gather", "gather") else 1
        index = self.begin(kind, group, inputs, whole)
        result = function(*args, **kwargs)
        self.end(index, outputs or _tensors([result]))
        return result

    def _pass(self) -> int:
        """The number of the backward pass that has begun last."""
        return self._passes.get(torch._C._current_graph_task_id(), len(self._passes))

    def _mark(self, tensor: Tensor, *, makes: bool = True) -> _Mark | None:
        """The mark of a tensor's storage; None if it has none, or no storage."""
        if tensor.layout is not torch.strided:
            return None
        attributes = tensor.untyped_storage().__dict__
        if MARK not in attributes and makes:
            attributes[MARK] = _Mark(next(self._tokens))
        return attributes.get(MARK)

    def _use(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Note that an operator reads these tensors, or only writes to the first."""
        for number, tensor in enumerate(tensors):
            mark = self._mark(tensor, makes=False)
            if mark is None:
                continue
            if name in ONLY_WRITES and number == 0:
                if name != "copy_" or not self._arrives(mark):
                    self._overwrite(tensor, mark)
                continue
            mark.received.clear()
            if not (name.endswith("_") and number == 0):
                self._contents.read(tensor, mark.writes)

    def _arrives(self, mark: _Mark) -> bool:
        """Whether it is now that gloo copies the result of a reduce-scatter, waited for, there."""
        scattered = {i for i in mark.received.values() if self._sent[i].kind == "reduce_scatter"}
        scattered -= self._arrived
        self._arrived |= scattered
        return bool(scattered)

    def _overwrite(self, tensor: Tensor, mark: _Mark) -> None:
        """Note that a tensor is written to, without a look at what was there."""
        line = line_of_caller(FOREIGN)
        for place in [one for one in mark.received if overlap(one, region(tensor))]:
            index = mark.received.pop(place)
            self._overwritten[index] += 1
            self._lost[index] = self._lines[index], line
        if not any(_frames_of_fsdp()):
            self._contents.write(tensor, mark.writes, line)

    def _follow(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        """Note which results follow from what is computed on the device, and which are copies."""
        marks = [self._mark(tensor, makes=False) for tensor in tensors]
        if name.endswith("_") and marks and marks[0] is not None:
            marks[0].held = -1
        if any(mark is not None and mark.is_computed for mark in marks):
            for tensor in _tensors([result]):
                own = self._mark(tensor)
                if own is not None:
                    own.is_computed = True
                    if name in COPIES and tensor.dtype == tensors[0].dtype:
                        own.origin = self._identity(tensors[0])

    def _identity(self, tensor: Tensor) -> Any:
        """What is equal for tensors that are one, or an unchanged copy of one."""
        mark = self._mark(tensor)
        if mark is None or tensor.is_inference():
            return None
        if mark.origin is not None and tensor._version == 0:
            return mark.origin
        return mark.token, tensor._version, tensor.storage_offset(), tuple(tensor.shape)

    def _is_again(self, kind: str, group: Any, inputs: Sequence[Tensor], index: int) -> bool:
        """Whether these very tensors were sent before, and nothing made their result be lost.

        It is still there; or it came in this same forward pass, and they are no weights, whose
        whole may have been freed to save memory. A backward pass recomputes, so it may send again.
        The peer of a message is another each time.
        """
        keys = tuple(self._identity(tensor) for tensor in inputs)
        if torch._C._current_graph_task_id() >= 0 or None in keys or kind in ("send", "receive"):
            return False
        key = kind, group.group_name, keys
        before, in_pass = self._known.get(key, (-1, -1))
        self._known[key] = index, self._pass()
        if before < 0:
            return False
        results = self._results.get(before, [])
        if results and all(not one.expired() and mark.held == before for one, _, mark in results):
            return True
        marks = [self._mark(tensor) for tensor in inputs]
        return in_pass == self._pass() and not any(mark and mark.is_weight for mark in marks)

    def _gradient_in(self, inputs: Sequence[Tensor]) -> str:
        """Of what an all-reduce sums the gradients; "" if it sums something else."""
        node: Any = torch._C._current_autograd_node()
        if type(node).__name__ == "AccumulateGrad":
            return self._names.get(id(node.variable), "a parameter")
        if torch._C._current_graph_task_id() < 0 and self._passes:
            if sum(tensor.numel() for tensor in inputs) == self._num_elements:
                return "all parameters"
            places = set(map(_address, inputs)) - {0}
            for name, parameter in self._parameters.items():
                if (own := parameter.grad) is not None and _address(local_part(own)) in places:
                    return name
        return _unit_of_fsdp()

    def _read(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Note a read of tensors, unless none follows from weights or inputs."""
        marks = [self._mark(tensor, makes=False) for tensor in tensors]
        if any(mark is not None and mark.is_computed for mark in marks):
            self._late_reads.append(Read(operation, _site()))


_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class _Operators(TorchDispatchMode):
    """Shows a watch the operators, below autograd and DTensor."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler goes on as without this mode, as FlexAttention needs."""
        return True

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # DTensor finds shapes by tensors without values.
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        if is_fake or not isinstance(function, torch._ops.OpOverload):
            return function(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            # Subclasses such as DTensor come first; this mode then sees the operators they call.
            return NotImplemented
        return self.watch.operator(function, args, kwargs or {}, self)


class _Functions(TorchFunctionMode):
    """Shows a watch the methods that read a tensor without an operator."""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation = METHODS.get(getattr(function, "__name__", ""))
        if operation is not None and args:
            self.watch.method(operation, args[0])
        return function(*args, **(kwargs or {}))


class Listening(Protocol):
    """What can be told of calls of collectives and messages; see StepWatch."""

    def begin(self, kind: str, group: Any, inputs: Sequence[Tensor], whole_bytes: int) -> int:
        """Note a call before it is made; returns its number."""

    def end(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Note what the call of this number writes to."""


class _Ears:
    """Tells each watch of a world of threads what its own rank sends."""

    def __init__(self) -> None:
        self.watches: dict[int, Listening] = {}

    def collective(
        self, rank: int, call: Call, ranks: Ranks, tensors: Tensors, results: Tensors
    ) -> int:
        kind = call.operation.partition(" ")[0]
        if rank in self.watches and kind != "barrier" and not in_transform():
            watch = self.watches[rank]
            group = group_of(call.group)
            whole = sum(map(_num_bytes, tensors))
            whole *= len(ranks) if kind in ("all_gather", "gather") else 1
            watch.end(watch.begin(kind, group, tensors, whole), results)
        return 0

    def message(self, rank: int, peer: int, tensor: Tensor, channel: str, *, is_send: bool) -> int:
        if rank in self.watches and not in_transform():
            watch = self.watches[rank]
            group = group_of(channel.rpartition(" ")[0])
            kind = "send" if is_send else "receive"
            index = watch.begin(kind, group, [tensor], _num_bytes(tensor))
            watch.end(index, [] if is_send else [tensor])
        return 0

    def waits(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def listening(watch: Listening) -> Iterator[None]:
    """Inside, `watch` hears what this rank sends, if ranks are threads."""
    if not is_rank():
        yield
        return
    exchange, rank = thread_world().exchange, current_rank()
    if not isinstance(exchange.listener, _Ears):
        exchange.listener = _Ears()
    ears = exchange.listener
    ears.watches[rank] = watch
    try:
        yield
    finally:
        del ears.watches[rank]
        if not ears.watches:
            exchange.listener = None


@functools.cache
def _kind_of(name: str) -> str | None:
    """What an operator sends, such as "all_gather"; None if it sends nothing."""
    short = name.replace("_", "")
    while short not in KINDS and short.endswith(SUFFIXES):
        short = short[: -len(next(end for end in SUFFIXES if short.endswith(end)))]
    return KINDS.get(short)


def group_of(value: Any) -> Any:
    """The process group that an argument of an operator is, or names; None if it does not."""
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return dist.ProcessGroup.unbox(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RuntimeError):
            return dist.distributed_c10d._resolve_process_group(cast(Any, value))
    return value if isinstance(value, dist.ProcessGroup) else None


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in arguments or results, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _read_by(name: str, args: Any) -> str:
    """What an operator reads of the device before it can go on; "" if nothing."""
    if name in INDEXING:
        masks = [one.dtype in (torch.bool, torch.uint8) for one in args[1] if one is not None]
        # One value is filled in without a look at where.
        is_filled = name != "index" and all(masks) and args[2].numel() == 1
        return "index by a mask" if any(masks) and not is_filled else ""
    return READS.get(name, "")


def _again(function: Any, args: Any, kwargs: Any, tensor: Tensor) -> list[Tensor]:
    """The results of an operator if it is given another tensor first."""
    return _tensors([function(tensor, *args[1:], **kwargs)])


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none of its own, as a sparse one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_worth_it(tensors: Sequence[Tensor]) -> bool:
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point()) >= LEAST_ELEMENTS


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _digest(tensors: Sequence[Tensor]) -> str:
    """A digest; "" if the tensors are too large, or hold one number only, as zeros do."""
    if sum(map(_num_bytes, tensors)) > MOST_DIGESTED_BYTES:
        return ""
    with _disable_current_modes(), torch.no_grad():
        if all(
            bool(dense(tensor).min() == dense(tensor).max()) for tensor in tensors if tensor.numel()
        ):
            return ""
        return " ".join(digest_of(tensor) for tensor in tensors)


def _what(tensors: Sequence[Tensor]) -> str:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    sizes = str(list(tensors[0].shape)) if len(tensors) == 1 else f"{len(tensors)} tensors"
    return f"{sizes} {'/'.join(sorted(dtypes))}".strip() if tensors else "nothing"


def _described(group: Any, ranks: Sequence[int]) -> str:
    """The axis of a group that is not one of the rank's axes, as torch names it."""
    words = {"default_pg": "the world", "undefined": f"ranks {', '.join(map(str, ranks))}"}
    return words.get(group.group_desc, group.group_desc.removeprefix("mesh_"))


def _site() -> str:
    """The line that called; "" if that is the comparison's own, which calls the backward pass."""
    site = call_site(
        (file, frame.f_lineno, frame.f_code.co_name)
        for frame in _frames()
        if (file := frame.f_code.co_filename) != __file__
    )
    return "" if site.startswith(THIS_FOLDER) else site


def _frames_of_fsdp() -> Iterator[Any]:
    """The frames of FSDP2 that have led here."""
    return (frame for frame in itertools.islice(_frames(), 30) if FSDP in frame.f_code.co_filename)


def _unit_of_fsdp() -> str:
    """The unit for which FSDP2 reduces gradients; "" if it is not FSDP2 that calls."""
    for frame in _frames_of_fsdp():
        name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
        if name is not None:
            return name or "the root"
    return ""


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
