"""The fork server: the process from which local ranks are forked. It imports torch once for all.

This module does not import torch. What the fork server imports is in titanlite/preload.py.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from titanlite.errors import ConfigError
from titanlite.ranks.signals import handling

PRELOAD = ["titanlite.preload"]

# The fork server listens on a Unix socket. Its path may have 107 bytes on Linux and 103 on macOS,
# and multiprocessing adds two names to the folder for temporary files: pymp-12345678 and
# listener-12345678.
LONGEST_FOLDER_BYTES = 103 - len("/pymp-12345678/listener-12345678")
# What `start_fork_server` changes, to be restored on the ranks.
PATHS = ("PYTHONSAFEPATH", "PYTHONPATH")
# Where a user may have chosen how CUDA's allocator works.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
OMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LIBRARY_VARIABLES = (*OMP, WORKSPACE, ALLOCATOR[0], "KINETO_LOG_LEVEL")
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def start_fork_server() -> None:
    """Start the process from which local ranks are forked, unless it runs; returns at once.

    It needs longer for its imports than a command needs to read and check a job, so a command that
    will certainly start ranks calls this first.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    _choose_socket_folder()
    # What is started inside ignores Ctrl-C, and so do ranks forked from it: the caller ends them.
    # The fork server must outlive the ranks, which do not ignore SIGTERM.
    interrupts = handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)
    with prepared_environment(), environment_restored(*PATHS), interrupts:
        # multiprocessing starts its helpers with `python -c`, which searches the working directory
        # first: a socket.py in a downloaded folder would run. Python 3.10 does not support
        # PYTHONSAFEPATH.
        path = filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])))
        set_environment({"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)})
        multiprocessing.forkserver.ensure_running()


def _choose_socket_folder() -> None:
    """Have multiprocessing put its sockets in a short folder, if that for temporary files is long.

    On a cluster, TMPDIR is often a long path in a job's own storage. Raises ConfigError if no short
    folder can be written to.
    """
    ours = tempfile.gettempdir()
    if len(os.fsencode(ours)) <= LONGEST_FOLDER_BYTES:
        return
    for folder in SHORT_FOLDERS:
        if os.access(folder, os.W_OK | os.X_OK):
            tempfile.tempdir = folder
            try:
                multiprocessing.util.get_temp_dir()  # made once, and removed when the process ends
            finally:
                tempfile.tempdir = ours
            return
    raise ConfigError(
        f"environment: TMPDIR is {ours}, which is too long for the path of a Unix socket; set it "
        f"to a folder whose path has at most {LONGEST_FOLDER_BYTES} characters"
    )


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set environment variables, and remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def environment_restored(*names: str) -> Iterator[None]:
    """On exit, these environment variables are as they were on entry."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        set_environment(before)


@contextlib.contextmanager
def prepared_environment() -> Iterator[None]:
    """Inside, the variables are set that libraries read when torch is imported, unless set."""
    with environment_restored(*LIBRARY_VARIABLES):
        prepare_environment()
        yield


def prepare_environment() -> None:
    """Set the environment variables of `prepared_environment` for the rest of this process."""
    # Threads that spin while they wait take cores from working threads if there are more runnable
    # threads than cores: on a busy machine that is twenty times slower. Threads that sleep at once
    # make small operations twice as slow. GNU OpenMP, which PyTorch's Linux wheels include, can do
    # both: it spins for some microseconds, then sleeps.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Otherwise what a large model frees on a GPU lies in pieces, up to a third of what it needs.
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    # cuBLAS is deterministic only with buffers of a fixed size; 32 MiB is its default on Hopper.
    os.environ.setdefault(WORKSPACE, ":4096:8")
    # Otherwise the profiler logs to stderr on every rank.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
