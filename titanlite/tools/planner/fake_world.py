"""A world of any size in one process: a fake process group, fake tensors, and what they need.

Under a fake process group every collective returns at once, with shapes but no values. Two parts of
a step do not run that way and have stand-ins: DDP's reducer (C++ that reads memory) and compiled
blocks, which are traced as eager code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from titanlite.config import ResolvedJob
from titanlite.config.data import spec_for
from titanlite.data.spec import Dataset
from titanlite.modules.attention.documents import note, noted
from titanlite.modules.attention.kernels import CpuFlash
from titanlite.modules.batch import Batch
from titanlite.modules.device_support import DeviceSupport, supported_as
from titanlite.modules.tied import find_tied, tie
from titanlite.parallelize.ddp import apply as ddp
from titanlite.parallelize.float8.gather import Float8Shard
from titanlite.plain_job import Builders, build_dataset, build_plain_model
from titanlite.ranks.world import World
from titanlite.tools.planner.events import Allocation
from titanlite.tools.planner.recorder import StepRecorder


@contextlib.contextmanager
def fake_world(rank: int, size: int, device_type: str = "cpu") -> Iterator[World]:
    """The world of `size` ranks as `rank` sees it. No process group may exist yet.

    Its device is the CPU, unless "cuda" is asked for and there is a GPU: without one, autograd
    aborts on fake CUDA tensors.
    """
    has_device = device_type == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda" if has_device else "cpu")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    _forget_groups()
    try:
        yield World(rank, size, local_rank=0, local_size=1, device=device)
    finally:
        dist.destroy_process_group()
        _forget_groups()


def _forget_groups() -> None:
    """Clear DTensor's caches: they hold process groups of a world that is gone."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def fake_builders(mode: FakeTensorMode, device: torch.device) -> Builders:
    """Builders of a job without values: fake parameters, samples of zeros, DDP in Python."""

    def materialize(parts: Sequence[nn.Module]) -> None:
        with mode:
            for part in parts:
                tied = find_tied(part)
                part.to_empty(device=device)
                tie(part, tied)

    return Builders(build_plain_model, dataset_without_data, apply_ddp, materialize=materialize)


def faked(batch: Batch, mode: FakeTensorMode) -> Batch:
    """The batch without values."""
    fields = {name: mode.from_tensor(field) for name, field in batch.fields.items()}
    for name, field in batch.fields.items():
        if (known := noted(field)) is not None:
            note(fields[name], np.zeros_like(known.numbers))
    return Batch(fields, batch.dims)


@contextlib.contextmanager
def stand_ins(device_type: str = "cpu", *, fuses_norms: bool = True) -> Iterator[None]:
    """Inside, torch has stand-ins for what cannot run on fake tensors.

    A planned "cuda" device has the support of a GPU. Where there is none, it has, if it
    `fuses_norms`, a kernel for RMSNorm, which keeps its input and no float32 copy of it.
    """
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            # FSDP2 copies offloaded parameters from pinned memory.
            stack.enter_context(patch.object(FakeTensor, "is_pinned", lambda *_: True, create=True))
            if fuses_norms and not torch.cuda.is_available():
                stack.enter_context(patch.object(torch, "rms_norm", fused_rms_norm))
        stack.enter_context(supported_as(PlannedGpu() if device_type == "cuda" else FewChunks()))
        for place, name, stand_in in (
            (torch, "compile", partial(compile_as_graph, torch.compile)),
            (functional_collectives, "_are_we_tracing", is_compiling),
            (_fsdp_param, "_chunk_with_empty", Shards),
        ):
            stack.enter_context(patch.object(place, name, stand_in))
        stack.enter_context(patch.object(FakeTensor, "as_subclass", as_subclass, create=True))
        # Code compiled for another job has other shapes.
        torch.compiler.reset()
        yield


class FewChunks(DeviceSupport):
    """Of a loss's equal chunks, which can be hundreds, three run in a trace and stand for all."""

    def chunks(self, size: int, tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
        modes = _get_current_dispatch_mode_stack()
        recorders = [mode for mode in modes if isinstance(mode, StepRecorder)]
        few = _run_few(recorders[-1], size, tensors) if recorders else None
        return few or super().chunks(size, tensors)


def _run_few(
    recorder: StepRecorder, number: int, tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    size = len(tensors[0])
    num_equal, first = size // number, 0
    while first < size:
        before = len(recorder.events)
        yield tuple(one[first : first + number] for one in tensors)
        first += number
        if first == 3 * number < num_equal * number:
            first = num_equal * number
            again = [one for one in recorder.events[before:] if not isinstance(one, Allocation)]
            recorder.events += again * (num_equal - 3)


class FlashOfGpu(CpuFlash):
    """On the CPU, a kernel of a GPU, which skips the masked half of causal attention by itself."""

    smallest_triangle = None
    takes_masks = False


class PlannedGpu(FewChunks):
    """A GPU, which may not be here, or may copy from a host whose memory is planned too."""

    flash = FlashOfGpu()

    def capability(self, device: torch.device | str) -> tuple[int, int]:
        return super().capability("cuda") if torch.cuda.is_available() else (9, 0)

    def kernels(self, kernels: Sequence[Any]) -> Sequence[Any]:
        return [self.flash if isinstance(one, CpuFlash) else one for one in kernels]


def fused_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """A normalization that reads, writes and keeps what the kernel of a GPU does.

    On a CPU, PyTorch has such a kernel only for LayerNorm.
    """
    return torch.layer_norm(x, shape, weight, eps=1e-6 if eps is None else eps)


class Shards(Sequence[Tensor]):
    """FSDP2's shards of a tensor, each made when it is asked for: a rank needs two of all.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _chunk_with_empty
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        whole = self._tensor.size(self._dim)
        size = -(-whole // self._number)
        start = index * size
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, whole - start))


def compile_as_graph(
    compiler: Any, function: Any, *, backend: Any = "inductor", **options: Any
) -> Any:
    """torch.compile with graphs that run operator by operator, in place of the inductor's code.

    The graph is split in the same way into a forward and a backward pass, so the one keeps the same
    tensors for the other. The inductor fuses operators; here each is seen.
    """
    return compiler(function, backend="aot_eager" if backend == "inductor" else backend, **options)


def is_compiling() -> bool:
    """Whether torch.compile is building a graph, in which a collective is waited for at once.

    PyTorch takes fake tensors for a compiler's. In eager code a run waits for a collective when its
    result is used: the result is an AsyncCollectiveTensor.
    """
    return torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None


def as_subclass(tensor: Any, kind: type) -> Tensor:
    """The fake tensor itself, with the methods of a shard that FSDP2 gathers in float8.

    Tensor.as_subclass does not take a fake tensor. FSDP2 asks for these methods, not for the class.
    """
    if kind is Float8Shard:
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            setattr(tensor, name, MethodType(getattr(kind, name), tensor))
    return tensor


# The fields of tokens whose values do not change what a step does.
KNOWN_FIELDS = {"targets", "positions", "documents"}


def dataset_without_data(resolved: ResolvedJob, split: str) -> Dataset:
    """Samples of zeros, so that a job is planned without its data, if their shapes are known."""
    config = resolved.config
    name = config.training.dataset if split == "train" else config.validation_dataset
    spec = spec_for(config, name)
    if spec.has_tokens and spec.fields.keys() <= KNOWN_FIELDS:
        return ZeroTokens(resolved.seq_len, tuple(spec.fields))
    return build_dataset(resolved, split)


class ZeroTokens:
    """A data set of zeros; a Dataset."""

    num_samples = 1 << 40

    def __init__(self, seq_len: int, fields: tuple[str, ...]) -> None:
        self._seq_len, self._fields = seq_len, fields

    def sample(self, index: int) -> dict[str, Tensor]:
        zeros = torch.zeros(self._seq_len, dtype=torch.int64)
        return dict.fromkeys(("tokens", *self._fields), zeros)


def apply_ddp(
    model: nn.Module, replicate_mesh: DeviceMesh, *, compiled: bool = False
) -> ddp.DDPReport:
    """Reduce gradients in DDP's buckets, as parallelize.apply_ddp does.

    The buckets are DDP's own, in reverse order of the parameters. A bucket is reduced when all its
    gradients are there, unless set_requires_gradient_sync(False) was called.
    """
    state = _Replica(model, replicate_mesh.get_group())
    model.set_requires_gradient_sync = state.set_requires_gradient_sync  # type: ignore[assignment]
    return ddp.DDPReport(ddp.BUCKET_CAP_MB)


class _Replica:
    """DDP's reductions: one all-reduce a bucket, in a buffer that exists from the first step on."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group, self._syncs = model, group, True
        self._buckets: list[list[nn.Parameter]] = []
        self._buffers: list[Tensor] = []
        self._missing: list[set[int]] = []
        self._pending: list[Any] = []
        model.register_forward_pre_hook(self._start)

    def set_requires_gradient_sync(self, required: bool) -> None:
        self._syncs = required

    def _start(self, *_: Any) -> None:
        # As in DDP, at the first forward pass: until then parameters have no storage.
        if not self._buckets:
            trained = [p for p in self._model.parameters() if p.requires_grad][::-1]
            assign: Any = dist._compute_bucket_assignment_by_size
            # DDP's small first bucket is only the default.
            indices, _ = assign(trained, [ddp.BUCKET_CAP_MB << 20], [False] * len(trained))
            self._buckets = [[trained[index] for index in bucket] for bucket in indices]
            for number, bucket in enumerate(self._buckets):
                size = sum(parameter.numel() for parameter in bucket)
                self._buffers.append(bucket[0].new_empty(size))
                for place, parameter in enumerate(bucket):
                    parameter.register_post_accumulate_grad_hook(self._hook(number, place))
        self._missing = [set(range(len(bucket))) for bucket in self._buckets]

    def _hook(self, number: int, place: int) -> Any:
        def ready(_: Tensor) -> None:
            if not self._syncs:
                return
            self._missing[number].discard(place)
            if self._missing[number]:
                return
            buffer, offset = self._buffers[number], 0
            with torch.no_grad():
                for parameter in self._buckets[number]:
                    assert parameter.grad is not None
                    buffer[offset : offset + parameter.numel()] = parameter.grad.flatten()
                    offset += parameter.numel()
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            self._pending.append((work, number))
            if not any(self._missing):
                self._finish()

        return ready

    @torch.no_grad()
    def _finish(self) -> None:
        for work, number in self._pending:
            work.wait()
            offset, buffer = 0, self._buffers[number]
            for parameter in self._buckets[number]:
                assert parameter.grad is not None
                size = parameter.numel()
                parameter.grad.copy_(buffer[offset : offset + size].view_as(parameter))
                offset += size
        self._pending.clear()
