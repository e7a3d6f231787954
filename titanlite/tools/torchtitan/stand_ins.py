"""What a job of TorchTitan cannot have on a CPU, and what stands there instead.

`standing_in()` changes TorchTitan from outside, in this one place: its device, its kernels of
attention, and its call that clips gradients, which is made later (trainer.py). `Widened` is for
each rank: it keeps float64 where TorchTitan casts to a narrower dtype. STAND_INS says of each how
much it hides.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed import fsdp
from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback
from torch.distributed._symmetric_memory import (
    _fused_matmul_reduce_scatter_fallback as _matmul_reduce_scatter,
)
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from titanlite.errors import ConfigError, TitanliteError
from titanlite.ranks.settings import ignore_warnings
from titanlite.tools.torchtitan.kernels import (
    FLASH,
    causal_attention,
    flex_attention,
    grouped_product,
    of_rows,
    varlen_attention,
)
from titanlite.tools.torchtitan.muon import FUNCTIONS, initialize

INSTALL = 'give pip install "titanlite[torchtitan]"'
NARROW = {torch.float32, torch.bfloat16, torch.float16}
CASTS = {torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half}

STAND_INS = {
    "device": "the CPU; hides streams, memory and CUDA graphs",
    "data": (
        "random tokens, two documents a row, some labels ignored; hides the data loader, the "
        "tokenizer, and which rank reads what"
    ),
    "weights": "the reference's, sliced; hides how shards are drawn",
    "order": (
        "clipping, optimizers and learning rates are called after the rest of the step, with its "
        "arguments, so that gradients can be compared before; hides nothing that the step computes"
    ),
    "backend": (
        "partial_dtensor, since FSDP of this torch takes no parameters of spmd_types; hides the "
        "collectives of that backend"
    ),
    "sums": "of gradients by gloo, without a factor; hides PREMUL_SUM",
    "numbers": "casts to narrower dtypes keep float64; hides rounding, and a cast of one side only",
    "FlexAttention": "scores, mask and softmax in full; hides the kernel and the block mask",
    "VarlenAttention": "scores, mask and softmax in full; hides the kernel",
    "GroupedExperts": "a product for each expert in float64; hides torch._grouped_mm",
    "RowParallelLinear": "a collective, then a product; hides symmetric memory and its overlap",
    "DistMuon": (
        "streams that do nothing, and on the reference its functions on whole tensors; hides the "
        "overlap, and an error of these functions"
    ),
}
"""What stands in for something, and how much it hides."""

PLANNED = {
    "device": "tensors without values and a fake process group; hides what the allocator wastes",
    "data": "zeros, one document a row; hides the data loader, and the sums of a step that logs",
    "weights": "none are drawn",
    "graphs": "no CUDA graphs; they hide launches, and keep their memory",
    "compile": (
        "eager blocks; the time is that of operators fused by rule, the memory is not a compiler's"
    ),
    **dict.fromkeys(
        ("FlexAttention", "VarlenAttention"),
        "a causal flash kernel over rows or windows; values narrower than keys are counted as wide",
    ),
    "norm": "the fused RMSNorm of a GPU",
    "GroupedExperts": "torch._grouped_mm, as if all experts had equally many tokens",
    "RowParallelLinear": STAND_INS["RowParallelLinear"],
    "DistMuon": "its exchanges and its products one after the other; a GPU overlaps them",
    "backend": STAND_INS["backend"],
}
"""The same for a job that is planned."""

DEVICE = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30, name="cpu"),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda: None,
    synchronize=lambda *_: None,
)
"""What TorchTitan asks of the module of its device."""


OF_DEVICE: dict[str, Any] = {"device_type": "cpu", "device_module": DEVICE}


class MovedError(TitanliteError):
    """An attribute of TorchTitan is not where release 0.3 has it."""


def require_torchtitan() -> None:
    """Raise ConfigError unless a release of TorchTitan is installed that titanlite knows."""
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"torchtitan: is not installed; {INSTALL}") from None
    if not version.startswith("0.3."):
        raise ConfigError(f"torchtitan: release {version} is installed, not 0.3; {INSTALL}")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        raise ConfigError(f"torchtitan: 0.3 needs a newer torch than {torch.__version__}")


@contextlib.contextmanager
def standing_in(*, plans: bool = False) -> Iterator[None]:
    """Inside, TorchTitan runs on the CPU of this process, in any number of threads."""
    with contextlib.ExitStack() as exits:
        # Its Trainer turns the collection of garbage off, and its logger is the root.
        exits.callback(gc.enable if gc.isenabled() else gc.disable)
        exits.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        exits.enter_context(warnings.catch_warnings())
        ignore_warnings()
        exits.enter_context(patch.dict(os.environ, LOCAL_RANK="0"))
        # First, since other modules copy its names.
        utils = _module("tools.utils")
        for name, value in OF_DEVICE.items():
            exits.enter_context(_replaced(utils, name, value))
        attention, distributed = _module("models.common.attention"), _module("distributed.utils")
        _module("trainer")
        for name, module in list(sys.modules.items()):
            for copied in OF_DEVICE if name.startswith("torchtitan.") else ():
                if copied in vars(module):
                    exits.enter_context(patch.object(module, copied, OF_DEVICE[copied]))
        clip = functools.partial(_clip_later, attribute_of(distributed, "clip_grad_norm_"))
        masks = attribute_of(attention, "create_block_mask")
        muon = _module("distributed.flex_shard.dist_muon")
        begin = functools.partial(initialize, [attribute_of(muon, name) for name in FUNCTIONS])
        changes: tuple[tuple[Any, str, Any], ...] = (
            (attention.FlexAttention, "_compiled_flex_attn", flex_attention),
            (attention, "_compiled_create_block_mask", masks),
            (attention, "varlen_attn", varlen_attention),
            (distributed, "clip_grad_norm_", clip),
            (muon, "_initialize_dist_muon", begin),
            (muon.DistMuon, "_validate_parameter_storage", lambda _: torch.device("cpu")),
            # Its streams do nothing, but take no device.
            (torch.cpu, "Stream", lambda **_: torch.cpu.current_stream()),
            # PyTorch has these for tests; the fused operators need a GPU.
            (torch.ops.symm_mem, "fused_all_gather_matmul", _fused_all_gather_matmul_fallback),
            (torch.ops.symm_mem, "fused_matmul_reduce_scatter", _matmul_reduce_scatter),
        )
        for owner, name, value in changes:
            exits.enter_context(_replaced(owner, name, value))
        if plans:
            float8 = _module("components.quantization.float8")
            exits.enter_context(_replaced(float8, "has_cuda_capability", lambda *_: True))
        dtypes = attribute_of(_module("config"), "TORCH_DTYPE_MAP")
        exits.enter_context(patch.dict(dtypes, float64=torch.float64))
        yield


def keep_standing_in() -> None:
    """Let TorchTitan run on the CPU until this process ends, if it does not do so already."""
    if getattr(sys.modules.get("torchtitan.tools.utils"), "device_module", None) is not DEVICE:
        _kept.enter_context(standing_in())


_kept = contextlib.ExitStack()


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute of TorchTitan; raises MovedError, which names it, if there is none."""
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        where = getattr(owner, "__name__", f"{kind.__module__}.{kind.__qualname__}")
        raise MovedError(f"torchtitan: {where} has no {name} any more; titanlite knows 0.3")
    return getattr(owner, name)


def _module(name: str) -> Any:
    try:
        return import_module(f"torchtitan.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("torchtitan"):
            raise MovedError(f"torchtitan: {error} any more; titanlite knows 0.3") from error
        raise ConfigError(f"torchtitan: {error}; {INSTALL}") from error


def _replaced(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[Any]:
    attribute_of(owner, name)
    return patch.object(owner, name, value)


@contextlib.contextmanager
def without_values(mode: Any, seq_len: int, stage: Callable[..., Any]) -> Iterator[None]:
    """Inside of `standing_in`, a Trainer is built of tensors of a FakeTensorMode.

    A rank attends to `seq_len` tokens, and `stage` makes its stages of a pipeline.
    """
    attention = _module("models.common.attention")
    recomputed, utils = _module("distributed.activation_checkpoint"), _module("tools.utils")
    pipeline, model = _module("distributed.pipeline_parallel"), _module("protocols.model")
    dispatcher = attribute_of(_module("models.common.token_dispatcher"), "AllToAllTokenDispatcher")
    dispatched = attribute_of(dispatcher, "dispatch")
    saved, to_empty = attribute_of(recomputed, "_get_default_save_ops"), torch.nn.Module.to_empty

    def varlen_metadata(positions: torch.Tensor, **_: Any) -> Any:
        ends = positions.new_zeros(len(positions) + 1, dtype=torch.int32)
        return attention.VarlenMetadata(ends, ends, seq_len, seq_len)

    def dispatch(self: Any, x: Any, scores: torch.Tensor, *args: Any) -> Any:
        self.rows_without_values = scores.numel()
        return dispatched(self, x, scores, *args)

    def faked(module: torch.nn.Module, **kwargs: Any) -> Any:
        with mode:
            return to_empty(module, **kwargs)

    with contextlib.ExitStack() as exits:
        for owner, name, value in (
            (utils, "get_local_device", lambda: torch.device("cpu")),
            (model.BaseModel, "init_weights", lambda *_, **__: None),
            (attention.FlexAttention, "_compiled_flex_attn", staticmethod(causal_attention)),
            (attention, "_compiled_create_block_mask", _block_mask),
            (attention, "varlen_attn", functools.partial(of_rows, seq_len)),
            (recomputed, "_get_default_save_ops", lambda: saved() | {FLASH.default}),
            (dispatcher, "dispatch", dispatch),
            (dispatcher, "_sync_token_count_exchange", _even_counts),
            (pipeline, "PipelineStage", stage),
        ):
            exits.enter_context(_replaced(owner, name, value))
        copied = "create_varlen_metadata_for_document"
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan.models.") and hasattr(module, copied):
                exits.enter_context(patch.object(module, copied, varlen_metadata))
        exits.enter_context(patch.object(torch.nn.Module, "to_empty", faked))
        yield


def _block_mask(mask_mod: Any, b: int, _: Any, queries: int, keys: int, **kwargs: Any) -> Any:
    """A block mask of the same size, without the scores that it is made from."""
    size = kwargs.get("BLOCK_SIZE", 128)
    rows, columns = (size, size) if isinstance(size, int) else size
    shape = b, 1, -(-queries // rows), -(-keys // columns)
    counts, indices = (torch.zeros(one, dtype=torch.int32) for one in (shape[:3], shape))
    return BlockMask.from_kv_blocks(
        counts, indices, counts, indices, size, mask_mod, seq_lengths=(queries, keys)
    )


def _even_counts(self: Any, _: Any, counts: torch.Tensor, num_ranks: int) -> Any:
    """What a rank sends to each of its group, and gets from it, if all experts had as many."""
    counts = torch.ops._c10d_functional.wait_tensor(counts).reshape(-1)
    less, more = divmod(self.rows_without_values, num_ranks)
    splits = [less + (number < more) for number in range(num_ranks)]
    return counts, splits, list(splits)


_of_thread = threading.local()


@contextlib.contextmanager
def clipping(**changes: Any) -> Iterator[None]:
    """Inside, `before` is called before this thread clips gradients.

    If `calls`, a list, is given, it gets the calls that would clip them instead.
    """
    vars(_of_thread).update(changes)
    try:
        yield
    finally:
        for name in changes:
            delattr(_of_thread, name)


def _clip_later(clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    vars(_of_thread).get("before", lambda: None)()
    if "calls" not in vars(_of_thread):
        return clip(*args, **kwargs)
    _of_thread.calls.append(functools.partial(clip, *args, **kwargs))
    # The step only reports it.
    return torch.zeros(())


class Widened(TorchFunctionMode):
    """Inside, float64 stays float64 where code casts to a narrower dtype, or asks for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CASTS:
            return args[0].double()
        if func in BACKWARD:
            # What these recompute needs the mode, which is off inside of this call.
            with self:
                return BACKWARD[func](*args, **kwargs)
        if func is torch._grouped_mm:
            return grouped_product(*args, **kwargs)
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        if func is torch.mm:
            # A CPU has no kernel for it, and both have this dtype already.
            kwargs.pop("out_dtype", None)
        return func(*args, **kwargs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    gradient: Any = None,
) -> None:
    """What torch.autograd.backward does, from edges of the graph, which no mode intercepts."""
    given = grad_tensors if gradient is None else gradient
    if given is None:
        # Of an edge torch would not know that its tensor is a DTensor.
        every = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        given = [torch.ones_like(t) if isinstance(t, torch.Tensor) else None for t in every]
    torch.autograd.backward(
        _edges(tensors), given, retain_graph, create_graph, inputs=_edges(inputs)
    )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for torch.autograd.grad."""
    return torch.autograd.grad(_edges(outputs), _edges(inputs), *args, **kwargs)


BACKWARD: dict[Any, Callable[..., Any]] = {
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}


def _edges(tensors: Any) -> Any:
    if tensors is None:
        return None
    every = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    return tuple(get_gradient_edge(t) if isinstance(t, torch.Tensor) else t for t in every)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
