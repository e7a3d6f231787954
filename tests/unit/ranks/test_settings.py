"""What a run sets for the whole process: each job anew, and nothing stays after the run."""

import ast
import ctypes
import gc
import logging
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._dynamo.callback import callback_handler
from torch.utils.checkpoint import SAC_IGNORED_OPS

import titanlite

# Libraries that a run imports draw a random number as they are imported, once in a process.
import titanlite.checkpoint.run
import titanlite.observe.reporter
from titanlite.config import JobConfig, resolve_job
from titanlite.job import build_job
from titanlite.parallelize.activation_checkpoint.apply import IGNORED_OPERATORS
from titanlite.ranks.settings import keeping_freed_memory, own_settings
from titanlite.tools.planner.fake_world import fake_builders, fake_world, stand_ins
from titanlite.tools.planner.trace import applied_plan

# Here a job runs in the test's own process, in which torch warns of what it does itself.
pytestmark = pytest.mark.filterwarnings("default::UserWarning:torch")

ROOT = Path(__file__).parents[3]
Sections = Mapping[str, Mapping[str, Any]]

SMALL: Sections = {
    "model": {"flavor": "debug"},
    "training": {"dataset": "synthetic", "local_batch_size": 2, "global_batch_size": 4, "steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "sampling": {"num_samples": 0},
}
COMPILED = {"enable": True, "backend": "eager"}
SYMMETRIC = {"async_tensor_parallel_backend": "symmetric_memory"}
# Together they use every setting that titanlite changes.
JOBS: Mapping[str, Sections] = {
    "deterministic": {
        "debug": {"deterministic": True, "deterministic_warn_only": True},
        "compile": COMPILED,
        "activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.25},
    },
    "selective": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        "training": {"enable_cpu_offload": True},
        "checkpoint": {"enable": True, "interval": 1, "async_mode": "async"},
    },
}
WIDE_JOBS: Mapping[str, Sections] = {
    "ddp": {"parallelism": {"data_parallel_replicate_degree": 2}, "compile": COMPILED},
    "tp": {"parallelism": {"tensor_parallel_degree": 2}, "compile": COMPILED},
    "fsdp and tp": {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    },
    "budget": JOBS["deterministic"],
}


def config(folder: Path, changes: Sections) -> Any:
    sections = {name: dict(keys) for name, keys in SMALL.items()}
    sections["job"] = {"dump_folder": str(folder)}
    sections.setdefault("parallelism", {"data_parallel_shard_degree": 1})
    for name, keys in changes.items():
        sections.setdefault(name, {}).update(keys)
    return JobConfig.from_dict(sections)


def settings() -> dict[str, Any]:
    """All that one run of Python code can leave to the next one in its process."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    found: dict[str, Any] = {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "collection": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "recursion": sys.getrecursionlimit(),
        "logging": logging.root.manager.disable,
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "dtype": (torch.get_default_dtype(), torch.get_default_device()),
        "precision": torch.get_float32_matmul_precision(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "backends": {
            f"{name}.{flag}": getattr(getattr(torch.backends, name), flag)
            for name, flags in {
                "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
                "cuda.matmul": (),
                "mkldnn": ("enabled",),
            }.items()
            for flag in flags
        },
        "saved": set(SAC_IGNORED_OPS),
        "world": torch.distributed.is_initialized(),
        "compiler's listeners": str(callback_handler),
    }
    for one in loggers:
        found[f"logger {one.name}"] = (one.level, len(one.filters), one.disabled)
    for module in (
        torch._functorch.config,
        torch._dynamo.config,
        torch._inductor.config,
        torch.compiler.config,
    ):
        for name, value in module.get_config_copy().items():
            found[f"{module.__name__}.{name}"] = value
    return found


def changed(before: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from `before` now: name -> (before, now)."""
    now = settings()
    return {name: (before[name], now[name]) for name in before if before[name] != now[name]}


@pytest.mark.parametrize("name", JOBS)
def test_a_run_leaves_every_setting_of_its_process_as_it_was(tmp_path: Path, name: str) -> None:
    # Another test, which calls apply_ac by hand, leaves them.
    SAC_IGNORED_OPS.difference_update(IGNORED_OPERATORS)
    before, inside = settings(), {}

    def on_step(event: titanlite.callbacks.Event) -> None:
        inside.update(changed(before))

    titanlite.train(config(tmp_path, JOBS[name]), on_step=on_step)
    assert changed(before) == {}
    used = {
        "deterministic": {"deterministic", "torch._functorch.config.activation_memory_budget"},
        "selective": {"saved"},
    }
    assert {"environment", "collection", *used[name]} <= inside.keys()


def test_a_run_that_fails_leaves_every_setting_as_it_was(tmp_path: Path) -> None:
    before = settings()

    def fail(event: titanlite.callbacks.Event) -> None:
        raise ValueError("on purpose")

    with pytest.raises(titanlite.RankError, match="on purpose"):
        titanlite.train(config(tmp_path, {"debug": {"deterministic": True}}), on_step=fail)
    assert changed(before) == {}


@pytest.mark.parametrize("name", WIDE_JOBS)
def test_each_job_of_a_process_has_its_own_settings(tmp_path: Path, name: str) -> None:
    """A job that is built after another has the settings that it has alone."""
    plain = resolve_job(config(tmp_path, {}))
    first = resolve_job(config(tmp_path, WIDE_JOBS[name]))
    before = settings()
    found = []
    for jobs in ([plain], [first, plain]):
        with own_settings():
            for resolved in jobs:
                with fake_world(0, resolved.dims.world_size) as world, stand_ins():
                    from torch._subclasses.fake_tensor import FakeTensorMode

                    mode = FakeTensorMode(allow_non_fake_inputs=True)
                    build_job(resolved, world, fake_builders(mode, torch.device("cpu")))
            found.append(changed(before))
    alone, after = found
    # What only hides warnings, or has no meaning for a job that does not ask for it.
    harmless = {"saved", "warnings", "torch._inductor.config.compile_threads"}
    assert after.keys() - alone.keys() <= harmless
    assert changed(before) == {}


def test_a_plan_leaves_every_setting_as_it_was(tmp_path: Path) -> None:
    before = settings()
    for changes in WIDE_JOBS.values():
        applied_plan(resolve_job(config(tmp_path, changes)))
    assert changed(before) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's settings are those of glibc")
def test_malloc_gives_memory_back_after_a_run() -> None:
    libc: Any = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size = 64 * 2**20

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kept(size: int) -> int:
        """The bytes that this process still has after a block was freed."""
        before = resident()
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
        return resident() - before

    with keeping_freed_memory():
        assert kept(size) > size / 2
    # Twice the size: it cannot lie in the block that is free now, which stays in the process.
    assert kept(2 * size) < size / 2


# A call or an assignment that changes the process, in a file that may do so, and why.
ALLOWED = {
    "titanlite/ranks/threads.py": "each rank's own, as ranks that are threads take turns",
    "titanlite/ranks/settings.py": "the place for them",
    "titanlite/ranks/fork_server.py": "the environment in which the fork server starts",
    "titanlite/tools/learn/topics.py": "one thread while it measures",
    "titanlite/tools/planner/measure.py": "one thread while it measures, in a world",
    "titanlite/tools/verify/run.py": "half of the threads while the plan runs beside the reference",
    "titanlite/tools/verify/program/building.py": "the default dtype while a model is built",
}
CHANGING_CALLS = ("torch.set_", "torch.use_", "torch.cuda.set_", "torch.backends.", "os.putenv")
CHANGING_METHODS = ("setdefault", "pop", "update", "clear")
FILTERS = ("filterwarnings", "simplefilter", "resetwarnings")
GLOBAL_NAMES = ("SAC_IGNORED_OPS", "os.environ", "sys.excepthook")


WORDS = re.compile(
    r"\.config\.\w+ =|torch\.(set|use)_|torch\.cuda\.set_|backends\.|environ|putenv|mallopt"
    r"|SAC_IGNORED|excepthook|setLevel|warnings\.(filter|simple|reset|\w+ =)"
)


def changes_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The statements that change torch's configuration or the process: (line, text)."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any("catch_warnings" in ast.unparse(item) for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            text = ast.unparse(target)
            is_config = ".config." in text and text.startswith(("torch.", "inductor", "dynamo"))
            if is_config or text.startswith((*GLOBAL_NAMES, "torch.backends.", "warnings.")):
                yield node.lineno, text
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text, owner = ast.unparse(node.func), ast.unparse(node.func.value)
            is_change = (
                (text.startswith(CHANGING_CALLS) and text != "torch.set_grad_enabled")
                or node.func.attr in ("setLevel", "mallopt")
                or (owner in GLOBAL_NAMES and node.func.attr in CHANGING_METHODS)
                or (owner == "warnings" and node.func.attr in FILTERS and id(node) not in guarded)
            )
            if is_change:
                yield node.lineno, text


def test_only_one_module_changes_the_settings_of_the_process() -> None:
    assert WORDS.search("torch._dynamo.config.x = 1")
    wrong = "torch._dynamo.config.x = 1\nos.environ['A'] = 'b'\nwarnings.simplefilter('error')"
    assert [line for line, _ in changes_of(ast.parse(wrong))] == [1, 2, 3]
    found = {}
    for path in sorted([*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text().splitlines()
        # Reading the syntax takes a hundred times as long as looking for the words.
        if any(map(WORDS.search, lines)):
            for line, what in changes_of(ast.parse(path.read_text())):
                found.setdefault(name, []).append(f"{line}: {what}")
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() == found.keys()
