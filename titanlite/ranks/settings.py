"""The settings of a process that a run changes: torch's, the environment, threads, malloc.

They belong to the process, so a run must not find those of the run before it, nor leave its own.
Only this module changes them. `own_settings` puts back what a run has changed; open_world enters
it, and so does whatever builds one job after another in a world. When a job is built,
`start_settings` sets what the job may not mention; the steps then set what it asks for.
"""

import contextlib
import ctypes
import logging
import os
import pkgutil
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import SAC_IGNORED_OPS

from titanlite.ranks.fork_server import environment_restored
from titanlite.ranks.turns import is_rank


class Setting(NamedTuple):
    """A setting of torch: an attribute of a module."""

    module: str
    name: str


MEMORY_BUDGET = Setting("torch._functorch.config", "activation_memory_budget")
DDP_GRAPHS = Setting("torch._dynamo.config", "optimize_ddp")
FUSES_PRODUCTS = Setting("torch._inductor.config", "_micro_pipeline_tp")
LAST_PASS = Setting("torch._inductor.config", "post_grad_custom_post_pass")
COMPILE_THREADS = Setting("torch._inductor.config", "compile_threads")
SKIPS_SIDE_EFFECTS = Setting(
    "torch._dynamo.config", "skip_fwd_side_effects_in_bwd_under_checkpoint"
)
CACHE_TAG = Setting("torch.compiler.config", "cache_key_tag")
# The values for a job that does not ask for others. The other settings are set by each build, one
# way or the other, or have no meaning for a job that does not set them.
USUAL = {MEMORY_BUDGET: 1.0, DDP_GRAPHS: True, SKIPS_SIDE_EFFECTS: False, FUSES_PRODUCTS: False}

# What torch computes with MKL's vector functions.
OF_MKL = (
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt),
    *(torch.sin, torch.cos, torch.tan, torch.tanh, torch.sinh, torch.cosh),
    *(torch.asin, torch.acos, torch.atan, torch.erf, torch.erfc, torch.erfinv),
)

# What torch keeps for good: compiled code, and DTensor's plans for meshes, with their groups.
CACHES = (
    "torch._dynamo:reset",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RECORDER = "TORCH_FR_BUFFER_SIZE"
# This logger warns about activation checkpointing in each rank that compiles.
LOGGER = "torch._higher_order_ops.wrap"

# What puts back the settings of torch, one stack for each `own_settings` that is entered.
_undo: list[contextlib.ExitStack] = []


def change(setting: Setting, value: Any) -> None:
    """Set it for this process, until the end of the `own_settings` that this call is in."""
    module = import_module(setting.module)
    if _undo:
        _undo[-1].callback(setattr, module, setting.name, getattr(module, setting.name))
    setattr(module, setting.name, value)


def start_settings(*, deterministic: bool = False, warn_only: bool = False) -> None:
    """Undo what an earlier job of this process has set and a later one does not mention."""
    set_deterministic((deterministic, warn_only))
    for setting, value in USUAL.items():
        # A setting whose module is not imported has its usual value; older torch lacks some.
        if hasattr(sys.modules.get(setting.module), setting.name):
            change(setting, value)


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Inside, a run changes settings of this process; afterwards all are as they were before.

    The states of the random generators count as settings. Compiled code is dropped, since torch
    would reuse it, or count it as a recompilation, in another run of the same modules. For ranks
    that are threads, who starts them enters it once for all.
    """
    if is_rank():
        yield
        return
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        undo.enter_context(environment_restored(*INTERFACES, RECORDER))
        undo.callback(setattr, sys, "excepthook", sys.excepthook)
        undo.callback(logging.getLogger(LOGGER).setLevel, logging.getLogger(LOGGER).level)
        undo.callback(_set_ignored, set(SAC_IGNORED_OPS))
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(set_deterministic, deterministic())
        undo.enter_context(generators_restored())
        undo.callback(_clear_caches)
        undo.callback(_undo.remove, undo)
        _undo.append(undo)
        yield


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """On exit, the generators of torch, Python and NumPy are as they were on entry."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Inside, there is no default group, as in one process: what runs here calls no other rank."""
    world = dist.distributed_c10d._world
    group, world.default_pg = world.default_pg, None
    try:
        yield
    finally:
        world.default_pg = group


def prepare_process(*, one_node: bool, num_recorded: int, num_threads: int) -> None:
    """The settings of a rank's process: its interface, its flight recorders and its threads."""
    if one_node:
        for variable in INTERFACES:
            os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")
    os.environ[RECORDER] = str(num_recorded)
    choose_kernels()
    torch.set_num_threads(num_threads)


def choose_kernels() -> None:
    """Let MKL choose the kernels of its functions, in one thread.

    It does so at the first call of each. If threads share that call, one of them may round to half
    of the digits (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype)
        for function in OF_MKL:
            function(value)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Inside, these environment variables are set, unless the user has set them."""
    with environment_restored(*variables):
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        yield


def ignore_when_saving(operators: Iterable[Any]) -> None:
    """Let selective activation checkpointing neither save nor look for these operators."""
    SAC_IGNORED_OPS.update(operators)


def ignore_warnings(message: str = "", category: type[Warning] = Warning, module: str = "") -> None:
    """Like warnings.filterwarnings("ignore"), until the end of `own_settings`."""
    warnings.filterwarnings("ignore", message, category, module)


def initial_warnings() -> None:
    """Show warnings as a new process does, until the end of `own_settings`.

    A caller may have made errors of them, as pytest can; a rank's process would not know of it.
    """
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    # What `python -W` has asked for.
    process: Any = getattr(warnings, "_processoptions", lambda options: None)
    process(sys.warnoptions)


def silence_compiler() -> None:
    """Do not repeat the compiler's warnings about activation checkpointing on this rank."""
    logging.getLogger(LOGGER).setLevel(logging.ERROR)


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Inside, glibc keeps freed memory instead of returning it to the system at every step.

    Large tensors are freed and allocated again in each step. By default each is a separate mapping,
    and zeroing its pages takes a fifth of a step on CPU. Without glibc this has no effect.
    """
    LARGEST = 2**31 - 1
    _set_malloc(LARGEST, LARGEST)
    try:
        yield
    finally:
        # glibc cannot be asked for its thresholds. It raises them as large blocks are freed, up to
        # these values.
        if _set_malloc(32 * 2**20, 64 * 2**20):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set_malloc(mapped_from: int, trimmed_from: int) -> bool:
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_THRESHOLD, mapped_from)
            libc.mallopt(M_TRIM_THRESHOLD, trimmed_from)
            return True
    return False


def deterministic() -> tuple[bool, bool]:
    """Whether operations must be deterministic, and whether torch only warns of others."""
    is_on = torch.are_deterministic_algorithms_enabled()
    return is_on, torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(mode: tuple[bool, bool]) -> None:
    # The call imports the compiler.
    if mode != deterministic():
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_ignored(operators: set[Any]) -> None:
    SAC_IGNORED_OPS.clear()
    SAC_IGNORED_OPS.update(operators)


def _clear_caches() -> None:
    for place in CACHES:
        if place.partition(":")[0] in sys.modules:
            with contextlib.suppress(AttributeError):  # another version of torch
                pkgutil.resolve_name(place)()
