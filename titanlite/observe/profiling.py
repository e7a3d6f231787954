"""Profiler traces of a rank for Perfetto, and CUDA memory snapshots.

Both write one file per rank and `profiling.profile_freq` steps.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.config.schema import Profiling

_MAX_MEMORY_EVENTS = 100_000


@contextmanager
def profile_steps(
    section: Profiling, folder: Path, rank: int, device: torch.device, first_step: int = 1
) -> Iterator[Callable[[], None]]:
    """Trace the last `profiler_active` steps of every `profile_freq`, with torch.profiler.

    Writes {folder}/{save_traces_folder}/iteration_N/rankR_trace.json, where N is the last step of
    the trace. In the `profiler_warmup` steps before, the profiler runs but its events are dropped,
    since starting it distorts times. A cycle that is not finished when the run ends leaves no file.
    On CUDA the GPU's kernels are traced too. Open the files at https://ui.perfetto.dev. Yields a
    function to call after each training step.
    """
    if not section.enable_profiling:
        yield lambda: None
        return
    running = True

    def save_trace(profiler: profile) -> None:
        # Leaving the block also ends an unfinished cycle; its trace would be incomplete.
        if not running:
            return
        name = f"iteration_{first_step - 1 + profiler.step_num}"
        iteration = folder / section.save_traces_folder / name
        iteration.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(iteration / f"rank{rank}_trace.json"))

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(
            wait=section.profile_freq - section.profiler_warmup - section.profiler_active,
            warmup=section.profiler_warmup,
            active=section.profiler_active,
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
    section: Profiling,
    folder: Path,
    rank: int,
    device: torch.device,
    first_step: int = 1,
    *,
    on_note: Callable[[str], None] = print,
) -> Iterator[Callable[[], None]]:
    """Save CUDA's memory history every `profile_freq` steps.

    Writes {folder}/{save_memory_snapshot_folder}/iteration_N/rankR_memory_snapshot.pickle. A run
    that ends out of memory saves a last one in iteration_N_exit. Open the files at
    https://pytorch.org/memory_viz. On CPU there is no memory history: nothing is written, and
    `on_note` gets a line that says so. Yields a function to call after each training step.
    """
    if section.enable_memory_snapshot and device.type != "cuda":
        on_note(
            "profiling.enable_memory_snapshot: memory is only recorded on CUDA; "
            "the run goes on without snapshots"
        )
    if not section.enable_memory_snapshot or device.type != "cuda":
        yield lambda: None
        return
    step = first_step - 1

    def save(name: str) -> None:
        iteration = folder / section.save_memory_snapshot_folder / name
        iteration.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(iteration / f"rank{rank}_memory_snapshot.pickle"))

    def count() -> None:
        nonlocal step
        step += 1
        if step % section.profile_freq == 0:
            save(f"iteration_{step}")

    torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
    try:
        yield count
    except torch.OutOfMemoryError:
        save(f"iteration_{step}_exit")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
