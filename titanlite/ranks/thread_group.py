"""A process group of ranks that are threads of one process (turns.py), as a backend of torch.

It has what gloo and NCCL have: all collectives, reductions (AVG and PREMUL_SUM too), dtypes, P2P
messages, objects. The last rank that calls a collective computes it for all. Values are reduced in
the order of the ranks, so a sum has the same bits in every run. Tensors on a GPU are computed on
the stream of that rank, after the streams of the others; who waits lets its own stream wait.

torch lets Python derive a ProcessGroup, but no Backend; so this one is called by torch without the
dispatcher, and must itself hide its copies from autograd, whose version counters real backends do
not touch, and from the dispatch modes of the rank that happens to compute them.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from titanlite.errors import TitanliteError
from titanlite.ranks.hang_state import UNKNOWN, call_site, places_of
from titanlite.ranks.report import Call, Message
from titanlite.ranks.turns import Happening, Turns

# DeviceMesh compares meshes by thread, too, where the backend has this name: two ranks' meshes are
# never equal, so caches with meshes as keys do not mix them up.
BACKEND = "threaded"

# Their stubs name arguments in other ways than those of torch that call them.
_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup
Ranks: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = Sequence[Tensor]
Reduction: Any = dist.ReduceOp.RedOpType
REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.SUM: torch.Tensor.add_,
    Reduction.AVG: torch.Tensor.add_,
    Reduction.PREMUL_SUM: torch.Tensor.add_,
    Reduction.PRODUCT: torch.Tensor.mul_,
    Reduction.MIN: lambda one, other: torch.minimum(one, other, out=one),
    Reduction.MAX: lambda one, other: torch.maximum(one, other, out=one),
    Reduction.BAND: torch.Tensor.bitwise_and_,
    Reduction.BOR: torch.Tensor.bitwise_or_,
    Reduction.BXOR: torch.Tensor.bitwise_xor_,
}
# How many calls of a rank are kept, as by default in a process.
NUM_RECORDED = 2000
# A sum of truth values is whether any is true, as with gloo; torch adds none in place.
AS_INTEGERS = {torch.bool: torch.uint8}


@dataclass
class Operation:
    """One collective of a group, called by some of its ranks so far."""

    call: Call
    compute: Callable[[list[Any]], None]
    given: dict[int, Any] = field(default_factory=dict)
    given_at: list[Any] = field(default_factory=list)
    done: Happening = field(default_factory=Happening)


class Listener(Protocol):
    """Hears what the ranks of a world call and wait for; each call has a number, or 0 for none."""

    def collective(
        self, rank: int, call: Call, ranks: Ranks, tensors: Tensors, results: Tensors
    ) -> int: ...

    def message(
        self, rank: int, peer: int, tensor: Tensor, channel: str, *, is_send: bool
    ) -> int: ...

    def waits(self, number: int) -> AbstractContextManager[None]: ...


class ThreadWork(_Work):
    """The work of a collective or message; it is done once `done` has happened."""

    def __init__(
        self,
        exchange: InFlight,
        done: Happening,
        result: list[Tensor],
        sent: _Message | None = None,
        number: int = 0,
        given: Any = None,
    ) -> None:
        super().__init__()
        self._exchange, self._done, self._result = exchange, done, result
        self._message, self._number = sent, number
        # Kept until this rank has waited, as NCCL's is: so the rank itself releases what it has
        # allocated, and its memory can be counted.
        self._given = given

    def wait(self, timeout: Any = None) -> bool:
        listener = self._exchange.listener
        with listener.waits(self._number) if listener else contextlib.nullcontext():
            self._exchange.turns.wait_for(self._done)
        _follow(self._done.mark)
        self._given = None
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return self._done.has_happened

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """The rank that sent the message of a receive, in its group."""
        assert self._message is not None
        return self._message.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        # Who takes a future may wait for it in C++, where no other rank could take its turn.
        self.wait()
        gpus = {tensor.device for tensor in self._result if tensor.is_cuda}
        future: Any = torch.futures.Future(devices=list(gpus))
        future.set_result(self._result)
        return future


class InFlight:
    """What the groups of a world share: the collectives and messages that are under way."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.groups: dict[str, ThreadGroup] = {}
        """A member of each group, for reports."""
        self.listener: Listener | None = None
        self.operations: dict[tuple[str, int], Operation] = {}
        # (group, destination, tag) -> sends or receives whose peer has not called yet.
        self.sends: dict[tuple[str, int, int], deque[_Message]] = defaultdict(deque)
        self.receives: dict[tuple[str, int, int], deque[_Message]] = defaultdict(deque)
        self.calls: dict[int, deque[Call]] = defaultdict(lambda: deque(maxlen=NUM_RECORDED))
        """The last calls of each rank, as the flight recorder of a process has them."""


@dataclass(eq=False)
class _Message:
    tensor: Tensor
    source: int
    done: Happening
    given_at: Any


class ThreadGroup(_ProcessGroup):
    """The group `name` of the ranks `ranks` of the world, as seen by the `rank`-th of them."""

    def __init__(self, exchange: InFlight, name: str, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        self._exchange, self._rank, self.ranks = exchange, rank, tuple(ranks)
        self._key, self._number = name, 0
        self._desc = "undefined"
        exchange.groups[name] = self

    @property
    def label(self) -> str:
        """What a report calls the group if it knows no axis."""
        words = {"default_pg": "the world", "undefined": f"group {self._key}"}
        return words.get(self._desc, self._desc.removeprefix("mesh_"))

    def recorded_calls(self) -> list[Call]:
        """This rank's last calls of collectives, in all groups, the latest last."""
        under_way = self._exchange.operations
        return [
            replace(call, is_done=(call.group, call.number) not in under_way)
            for call in self._exchange.calls[self.ranks[self._rank]]
        ]

    # What torch asks of a group.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.ranks)

    getRank, getSize = rank, size

    @property
    def group_name(self) -> str:
        return self._key

    def getGroupName(self) -> str:
        return self._key

    def _set_group_name(self, name: str) -> None:
        self._key = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, description: str) -> None:
        self._desc = description

    setGroupDesc = _set_group_desc

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        """What a run shows."""
        return "threads"

    def _get_backend(self, device: Any) -> ThreadGroup:
        """What carries out the collectives of a device's tensors: this group itself."""
        return self

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def _start_coalescing(self, device: Any) -> None:
        """Each operation is carried out by itself."""

    def _end_coalescing(self, device: Any) -> ThreadWork:
        done = Happening()
        done.has_happened = True
        return ThreadWork(self._exchange, done, [])

    def shutdown(self) -> None:
        """There is nothing to shut down or to abort."""

    abort = shutdown

    def set_timeout(self, timeout: Any) -> None:
        """A world of threads needs no timeout: it knows when no rank can go on."""

    # Collectives. Each is given, per rank, what `compute` needs.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        how = opts.reduceOp if opts is not None else dist.ReduceOp(dist.ReduceOp.SUM)

        def compute(everyone: list[list[Tensor]]) -> None:
            for same in zip(*(map(_in_memory, own) for own in everyone), strict=True):
                total = _reduced(list(same), how)
                for tensor in same:
                    _write(tensor, total)

        return self._join("all_reduce", tensors, tensors, compute, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        root, at = (0, 0) if opts is None else (opts.rootRank, opts.rootTensor)

        def compute(everyone: list[list[Tensor]]) -> None:
            for rank, own in enumerate(everyone):
                for number, tensor in enumerate(own):
                    if rank != root or number != at:
                        source = everyone[root][at if len(own) == 1 else number]
                        _write(_in_memory(tensor), _in_memory(source))

        return self._join("broadcast", tensors, tensors, compute, tensors, root)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ThreadWork:
        def compute(everyone: list[list[Tensor]]) -> None:
            for same in zip(*(map(_in_memory, own) for own in everyone), strict=True):
                _write(same[opts.rootRank], _reduced(list(same), opts.reduceOp))

        return self._join("reduce", tensors, tensors, compute, tensors, opts.rootRank)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        def compute(everyone: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for own, _ in everyone:
                for number, parts in enumerate(own):
                    for part, (_, given) in zip(parts, everyone, strict=True):
                        _write(part, given[number].reshape(part.shape))

        return self._join("all_gather", (outputs, inputs), inputs, compute, _flat(outputs))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        # Its outputs are listed by rank, those of allgather by tensor.
        return self.allgather([list(same) for same in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        return self.allgather([_parts(output, self.size()) for output in outputs], inputs, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> ThreadWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    # Names of other versions of torch.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ThreadWork:
        def compute(everyone: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
            for part, (_, given) in zip(everyone[opts.rootRank][0][0], everyone, strict=True):
                _write(part, given[0])

        root = opts.rootRank
        return self._join("gather", (outputs, inputs), inputs, compute, _flat(outputs), root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ThreadWork:
        def compute(everyone: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            for part, (own, _) in zip(everyone[opts.rootRank][1][0], everyone, strict=True):
                _write(_in_memory(own[0]), _in_memory(part))

        root = opts.rootRank
        return self._join("scatter", (outputs, inputs), outputs, compute, outputs, root)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> ThreadWork:
        def compute(everyone: list[tuple[list[Tensor], list[list[Tensor]]]]) -> None:
            totals = [
                (output, _reduced([given[number][rank] for _, given in everyone], opts.reduceOp))
                for rank, (own, _) in enumerate(everyone)
                for number, output in enumerate(own)
            ]
            for output, total in totals:
                _write(output, total)

        return self._join("reduce_scatter", (outputs, inputs), _flat(inputs), compute, outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> ThreadWork:
        parts = [_parts(given, self.size()) for given in inputs]
        flat = [output.view(part[0].shape) for output, part in zip(outputs, parts, strict=True)]
        return self.reduce_scatter(flat, parts, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> ThreadWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ThreadWork:
        def compute(everyone: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for rank, (own, _) in enumerate(everyone):
                for part, (_, given) in zip(own, everyone, strict=True):
                    if part.numel() != given[rank].numel():
                        raise TitanliteError(
                            f"all_to_all: rank {self.ranks[rank]} receives {part.numel()} elements "
                            f"from a rank that sends {given[rank].numel()}"
                        )
                    _write(part, given[rank].reshape(part.shape))

        return self._join("all_to_all", (outputs, inputs), inputs, compute, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> ThreadWork:
        def parts(tensor: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
            return list(tensor.split(list(sizes or [len(tensor) // self.size()] * self.size())))

        _check_contiguous(given, "all_to_all_single")
        return self.alltoall(parts(output, output_sizes), parts(given, input_sizes), opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> ThreadWork:
        return self._join("barrier", None, [], lambda everyone: None, [])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        self.barrier().wait()

    # Messages. A send is done once it has been received, as with NCCL.

    def send(self, tensors: list[Tensor], to: int, tag: int) -> ThreadWork:
        (tensor,) = tensors
        return self._meet((self._key, to, tag), tensor, self._rank, to)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> ThreadWork:
        (tensor,) = tensors
        return self._meet((self._key, self._rank, tag), tensor, source, None)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ThreadWork:
        return self.recv(tensors, -1, tag)

    def _meet(
        self, key: tuple[str, int, int], tensor: Tensor, source: int, to: int | None
    ) -> ThreadWork:
        shared = self._exchange
        peer = source if to is None else to
        what = f"{'receive' if to is None else 'send'} of {_size(tensor)}"
        _check_contiguous(tensor, what)
        peers = () if peer < 0 else (self.ranks[peer],)
        done = Happening(Message(what, peers, user_site(), self.label))
        own = _Message(tensor, source, done, _mark([tensor]))
        mine, theirs = shared.sends[key], shared.receives[key]
        if to is None:
            mine, theirs = theirs, mine
        fitting = (one for one in theirs if source in (-1, one.source) or one.source == -1)
        if (other := next(fitting, None)) is None:
            mine.append(own)
        else:
            theirs.remove(other)
            sent, received = (other, own) if to is None else (own, other)
            if sent.tensor.numel() != received.tensor.numel():
                raise TitanliteError(
                    f"rank {self.ranks[sent.source]} sends {_size(sent.tensor)} to rank "
                    f"{self.ranks[key[1]]}, which receives {_size(received.tensor)}"
                )
            _follow(other.given_at)
            with unseen():
                _write(received.tensor, sent.tensor.reshape(received.tensor.shape))
            other.done.mark = done.mark = _mark([received.tensor])
            received.source = sent.source
            shared.turns.happen(other.done)
            own.done.has_happened = True
        number = 0
        if shared.listener and peer >= 0:
            ends, channel = (self.ranks[self._rank], self.ranks[peer]), f"{self._key} {key[2]}"
            number = shared.listener.message(*ends, tensor, channel, is_send=to is not None)
        return ThreadWork(shared, own.done, [tensor], own, number)

    def _join(
        self,
        name: str,
        given: Any,
        sizes: Sequence[Tensor],
        compute: Callable[[list[Any]], None],
        result: list[Tensor],
        root: int | None = None,
    ) -> ThreadWork:
        """Give this rank's part; the last rank of the group computes the results of all."""
        shared = self._exchange
        self._number += 1
        key = self._key, self._number
        dtype = str(sizes[0].dtype).removeprefix("torch.") if sizes else ""
        numel = sum(tensor.numel() for tensor in sizes)
        call = Call(
            *(self._key, self._number, name, numel, dtype, user_site()),
            is_done=False,
            root=None if root is None else self.ranks[root],
        )
        own = self.ranks[self._rank]
        shared.calls[own].append(call)
        under_way = shared.operations.get(key)
        if under_way is None:
            under_way = shared.operations[key] = Operation(call, compute)
            under_way.done.what = call
        elif under_way.call.likeness() != call.likeness():
            # They never meet. Once no rank can go on, the calls of all of them tell which is wrong;
            # an error raised here could be caught by the code of a rank.
            shared.turns.wait_for(Happening(call))
        under_way.given[self._rank] = given
        under_way.given_at.append(_mark(sizes))
        number = 0
        if shared.listener:
            # Before a result may overwrite what this rank gives.
            number = shared.listener.collective(own, call, self.ranks, sizes, result)
        if len(under_way.given) == self.size():
            del shared.operations[key]
            for mark in under_way.given_at:
                _follow(mark)
            with unseen():
                under_way.compute([under_way.given[rank] for rank in range(self.size())])
            under_way.done.mark = _mark(result)
            shared.turns.happen(under_way.done)
        return ThreadWork(shared, under_way.done, result, number=number, given=given)


# torch.compile would follow the calls of a group that is written in Python, into the turns of the
# ranks. It leaves these methods, and what they call, as they are.
for _class in (ThreadWork, ThreadGroup):
    for _name, _method in list(vars(_class).items()):
        if isinstance(_method, FunctionType) and not _name.startswith("__"):
            setattr(_class, _name, torch._disable_dynamo(_method))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, what is computed for other ranks is seen by no mode or autograd of this one."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def user_site() -> str:
    """The line that called a collective: the innermost frame that is not torch's or this one's."""
    return call_site(places_of(traceback.walk_stack(sys._getframe(1)))) or UNKNOWN


def _mark(tensors: Sequence[Tensor]) -> Any:
    """Where this thread's stream is, if one of the tensors is on a GPU; else None."""
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    return torch.cuda.current_stream().record_event() if on_gpu else None


def _follow(mark: Any) -> None:
    """Let this thread's stream wait for a mark."""
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


def _size(tensor: Tensor) -> str:
    return f"{tensor.numel():,} {str(tensor.dtype).removeprefix('torch.')}"


def _flat(nested: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for inner in nested for tensor in inner]


def _parts(tensor: Tensor, number: int) -> list[Tensor]:
    """Equal parts of a tensor, along dimension 0 or as a stack."""
    shape: tuple[int, ...] = (tensor.numel() // number,)
    if tensor.dim() and tensor.shape[0] % number == 0:
        shape = (tensor.shape[0] // number, *tensor.shape[1:])
    return list(tensor.reshape(number, *shape).unbind())


def _in_memory(tensor: Tensor) -> Tensor:
    """As gloo and NCCL take it where they copy nothing: its elements in the order of its memory."""
    return tensor if tensor.is_sparse else tensor.as_strided((tensor.numel(),), (1,))


def _check_contiguous(tensor: Tensor, what: str) -> None:
    """Those backends raise an error, too."""
    if not tensor.is_contiguous():
        raise TitanliteError(f"{what}: the tensor is not contiguous; call contiguous() before")


def _write(tensor: Tensor, value: Tensor) -> None:
    if tensor.is_sparse:  # Its `.data` would get the indices and values alone.
        tensor.copy_(value.coalesce())
    else:  # Through `.data`: a backend's write is no change that autograd would see.
        tensor.data.copy_(value)


def _reduced(tensors: list[Tensor], how: Any) -> Tensor:
    """The reduction of the ranks' tensors, in the order of the ranks."""
    kind, factor = how.__getstate__() if not isinstance(how, Reduction) else (how, None)
    dtype = tensors[0].dtype
    first, *rest = (tensor.detach().to(AS_INTEGERS.get(dtype, dtype)) for tensor in tensors)
    factor = 1 if factor is None else factor
    total = first.clone() if factor == 1 else first * factor
    reduce = REDUCTIONS[kind]
    for one in rest:
        total = reduce(total, one if factor == 1 else one * factor)
    if kind == Reduction.AVG:
        total = total / len(tensors) if total.is_floating_point() else total // len(tensors)
    return total.to(dtype)
