"""The command `titanlite debug`: pdb in a rank of a job whose ranks are threads of this process."""

from __future__ import annotations

import pdb
import sys
import threading
from bdb import BdbQuit
from collections.abc import Sequence
from types import FrameType
from typing import Any

from titanlite.callbacks import TrainResult
from titanlite.config import ResolvedJob, read_job
from titanlite.errors import ConfigError, RankError, TitanliteError, quote
from titanlite.ranks.launch import Place, run_ranks
from titanlite.run import train_on_rank
from titanlite.start import check_start

HELP = """usage: titanlite debug CONFIG.toml [--rank N] [--section.key=value ...]

Train a job whose ranks are threads of this process, of which one runs at a time. A debugger (pdb)
opens where a rank raises an error, and at breakpoint(); the other ranks stand still meanwhile.

  --rank N            only in rank N; without it, in the first rank that comes there
  --section.key=value any key of the job, as for train.py

In the debugger, `others` lists where every rank is and what it waits for. `q` ends the run.

exit status: 0 the job has run, 1 it has not, 2 bad input"""

EXAMPLE = "titanlite debug configs/tp2_fsdp2.toml --rank 3"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        return 0
    rank, words = _parse(arguments)
    reading = read_job(words, needs_file=EXAMPLE)
    start = check_start(reading, trains=True, threads=True)
    size = start.job.dims.world_size
    if rank is not None and rank >= size:
        raise ConfigError(f"--rank: {rank} is not a rank of this job; give 0 to {size - 1}")
    before, sys.breakpointhook = sys.breakpointhook, Debugging(rank).at_breakpoint
    try:
        run_ranks(_on_rank, size, start.job, start.device_type, rank, threads=True)
    except TitanliteError as error:
        if isinstance(_first_cause(error), BdbQuit):
            print("stopped in the debugger", file=sys.stderr)
        else:
            trace = error.rank_traceback if isinstance(error, RankError) else ""
            print(f"{trace}\n{error}".strip(), file=sys.stderr)
        return 1
    finally:
        sys.breakpointhook = before
    return 0


def _parse(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The rank of --rank, and the arguments of the job."""
    rank, words, rest = None, [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name == "--rank":
            text = text if equals else rest.pop(0) if rest else ""
            if not (text.isascii() and text.isdecimal()):
                raise ConfigError(f"--rank: {quote(text)} is not a rank; give its number")
            rank = int(text)
        else:
            words.append(word if word.startswith("--") else f"--job.config_file={word}")
    return rank, words


def _on_rank(place: Place, job: ResolvedJob, device_type: str, rank: int | None) -> TrainResult:
    try:
        return train_on_rank(place, job, device_type)
    except Exception as error:
        cause = _first_cause(error)
        if not isinstance(cause, BdbQuit):
            Debugging(rank).at_error(place.rank, cause)
        raise


def _first_cause(error: BaseException) -> BaseException:
    """The error that others explain."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


class Debugging:
    """Opens the debugger in `rank`, or if that is None, in any rank."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def at_breakpoint(self, *_: Any, **__: Any) -> None:
        """What breakpoint() does."""
        from titanlite.ranks.threads import thread_world
        from titanlite.ranks.turns import current_rank

        try:
            rank = current_rank()
        except LookupError:
            pdb.Pdb().set_trace(sys._getframe(1))
            return
        frame = sys._getframe(1)
        if self.rank in (None, rank) and not _is_tried(frame):
            RankDebugger(rank, thread_world()).set_trace(frame)

    def at_error(self, rank: int, error: BaseException) -> None:
        """Open the debugger at the line of a rank's error."""
        from titanlite.ranks.threads import thread_world

        if self.rank not in (None, rank):
            return
        print(f"rank {rank}: {type(error).__name__}: {error}")
        debugger = RankDebugger(rank, thread_world())
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def _is_tried(frame: FrameType | None) -> bool:
    """Whether the code is only tried, on small inputs, while its job is checked and built."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "titanlite.plain_job":
            return True
        frame = frame.f_back
    return False


class RankDebugger(pdb.Pdb):
    """pdb in one rank of a world of threads; `others` tells where the other ranks are."""

    def __init__(self, rank: int, world: Any) -> None:
        super().__init__(nosigint=threading.current_thread() is not threading.main_thread())
        self.prompt = f"(rank {rank}) "
        self._world = world

    def do_others(self, _: str) -> None:
        """others: where each rank is, and the collective or message that it waits for."""
        self.message(self._world.describe())
