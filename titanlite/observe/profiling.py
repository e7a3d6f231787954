"""Profiler traces of a rank for Perfetto, and CUDA memory snapshots.

Both write one file per rank to {folder}/iteration_N/.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_MAX_MEMORY_EVENTS = 100_000


def _count_nothing() -> None:
    """What is called after each step if nothing is recorded."""


@contextmanager
def profile_steps(
    enabled: bool,
    folder: str | Path,
    rank: int,
    profile_freq: int = 10,
    profiler_active: int = 1,
    profiler_warmup: int = 3,
    *,
    first_step: int = 1,
    device_type: str = "cpu",
) -> Iterator[Callable[[], None]]:
    """Trace the last `profiler_active` steps of every `profile_freq`, with torch.profiler.

    Writes {folder}/iteration_N/rankR_trace.json, where N is the last step of the trace. In the
    `profiler_warmup` steps before, the profiler runs but its events are dropped, since starting it
    distorts times. A cycle that is not finished when the run ends leaves no file. With a
    `device_type` of "cuda", the GPU's kernels are traced too. Open the files at
    https://ui.perfetto.dev. Yields a function to call after each training step.
    """
    if not enabled:
        yield _count_nothing
        return
    running = True

    def save_trace(profiler: profile) -> None:
        # Leaving the block also ends an unfinished cycle; its trace would be incomplete.
        if not running:
            return
        iteration = Path(folder) / f"iteration_{first_step - 1 + profiler.step_num}"
        iteration.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(iteration / f"rank{rank}_trace.json"))

    activities = [ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(
            wait=profile_freq - profiler_warmup - profiler_active,
            warmup=profiler_warmup,
            active=profiler_active,
        ),
        on_trace_ready=save_trace,
        record_shapes=True,
    ) as profiler:

        def step() -> None:
            with warnings.catch_warnings():
                # Each cycle has its own file, so no events are lost when the next cycle starts.
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
                profiler.step()

        try:
            yield step
        finally:
            running = False


@contextmanager
def snapshot_memory(
    enabled: bool,
    folder: str | Path,
    rank: int,
    device: torch.device | str,
    profile_freq: int = 10,
    *,
    first_step: int = 1,
    on_note: Callable[[str], None] = print,
) -> Iterator[Callable[[], None]]:
    """Save CUDA's memory history every `profile_freq` steps.

    Writes {folder}/iteration_N/rankR_memory_snapshot.pickle. A run that ends out of memory saves a
    last one in iteration_N_exit. Open the files at https://pytorch.org/memory_viz. On CPU there is
    no memory history: nothing is written, and `on_note` gets a line that says so. Yields a function
    to call after each training step.
    """
    if enabled and torch.device(device).type != "cuda":
        on_note(
            "profiling.enable_memory_snapshot: memory is only recorded on CUDA; "
            "the run goes on without snapshots"
        )
        enabled = False
    if not enabled:
        yield _count_nothing
        return
    step = first_step - 1

    def save(name: str) -> None:
        iteration = Path(folder) / name
        iteration.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(iteration / f"rank{rank}_memory_snapshot.pickle"))

    def count() -> None:
        nonlocal step
        step += 1
        if step % profile_freq == 0:
            save(f"iteration_{step}")

    torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
    try:
        yield count
    except torch.OutOfMemoryError:
        save(f"iteration_{step}_exit")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
