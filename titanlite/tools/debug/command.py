"""The command `titanlite debug`: pdb in a rank of a job whose ranks are threads of this process."""

from __future__ import annotations

import pdb
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType
from typing import Any

from titanlite.config import read_job
from titanlite.errors import ConfigError, RankError, TitanliteError, quote
from titanlite.observe.terminal import tell
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.turns import WorldEnded
from titanlite.run import train_on_rank
from titanlite.start import Start, check_start
from titanlite.tools.options import positive, rank_number, require_writable, split_options, write

HELP = """usage: titanlite debug CONFIG.toml [--rank N] [--section.key=value ...]
       titanlite debug CONFIG.toml --record FILE.html [--step N] [--section.key=value ...]

Train a job whose ranks are threads of this process, of which one runs at a time. A debugger (pdb)
opens where a rank raises an error, at breakpoint(), and where a rank waits once no rank can go on;
the other ranks stand still meanwhile.

  --rank N            only in rank N; without it, in the first rank that comes there
  --record FILE       instead, train to one step, and draw what each rank sends to whom in it, and
                      in which module: FILE.html to step through, or FILE.svg
  --step N            the step to record (default 2: the first one also sets up)
  --section.key=value any key of the job, as for train.py

In the debugger, `others` lists where every rank is and what it waits for. `q` ends the run.

exit status: 0 the job has run, 1 it has not, 2 bad input"""

EXAMPLE = "titanlite debug configs/tp2_fsdp2.toml --rank 3"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises ConfigError for bad input."""
    options = _parse(arguments)
    reading = read_job(options.words, needs_file=EXAMPLE)
    start = check_start(reading, trains=True, threads=True)
    tell(f"starting {start.job.dims.world_size} ranks as threads")
    if options.record:
        return _record(start, options.record, options.step or 2)
    size, rank = start.job.dims.world_size, options.rank
    if rank is not None and rank >= size:
        raise ConfigError(f"--rank: {rank} is not a rank of this job; give 0 to {size - 1}")
    return debug_ranks(size, rank, train_on_rank, start.job, start.device_type)


def debug_ranks(size: int, rank: int | None, function: Callable[..., Any], *args: Any) -> int:
    """Run `function(place, *args)` on ranks that are threads, with a debugger in one or in any.

    Returns the exit status of a command.
    """
    before, sys.breakpointhook = sys.breakpointhook, Debugging(rank).at_breakpoint
    try:
        spawn(_on_rank, size, rank, function, args, threads=True)
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


def _record(start: Start, path: str, step: int) -> int:
    """Record one step, and draw it."""
    from titanlite.tools.debug.messages import record_step

    job = start.job
    if job.dims.world_size == 1:
        raise ConfigError("--record: a job of one rank sends no messages; give it a plan")
    try:
        record = record_step(job, step)
    except RankError as error:
        print(f"{error.rank_traceback}\n{error}".strip(), file=sys.stderr)
        return 1
    source = job.config.job.config_file
    title = f"Step {step}{f' of {source}' if source else ''}: {job.dims.describe()}"
    caption = f"{len(record.messages)} messages and {len(record.calls)} collectives"
    draw = record.svg if path.endswith(".svg") else record.html
    places = map(job.dims.describe_place, range(job.dims.world_size))
    rows = [f"rank {rank} ({place})" for rank, place in enumerate(places)]
    write(path, draw(title, caption, rows))
    print(f"{title}, {caption}: {path}")
    return 0


@dataclass
class DebugOptions:
    """The parsed command line; `words` are the arguments of the job."""

    words: list[str]
    rank: int | None = None
    record: str = ""
    step: int = 0


def _parse(arguments: Sequence[str]) -> DebugOptions:
    values = {"--rank": rank_number, "--record": _picture, "--step": positive}
    found, words = split_options(arguments, values, text=HELP)
    options = DebugOptions(words, **found)
    if options.step and not options.record:
        raise ConfigError("--step: is the step that --record draws; add --record FILE.html")
    if options.record and options.rank is not None:
        raise ConfigError("--rank: is for the debugger, and --record opens none; remove one")
    return options


def _picture(text: str) -> str:
    if not text.endswith((".html", ".svg")):
        raise ConfigError(f"--record: {quote(text)} is neither FILE.html nor FILE.svg")
    require_writable(text, "--record")
    return text


def _on_rank(place: Place, rank: int | None, function: Callable[..., Any], args: Any) -> Any:
    try:
        return function(place, *args)
    except Exception as error:
        cause = _first_cause(error)
        if not isinstance(cause, BdbQuit):
            # Where torch has caught and raised it again, the cause knows torch's frames alone.
            known = [one for one in _chain(error) if _own_places(one.__traceback__)]
            Debugging(rank).at_error(place.rank, cause, known[-1].__traceback__)
        raise
    except WorldEnded as ended:
        Debugging(rank).at_end(place.rank, ended.__traceback__)
        raise


def _first_cause(error: BaseException) -> BaseException:
    """The error that others explain."""
    return _chain(error)[-1]


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and its causes, the first of them last."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _own_places(traceback: Any) -> list[int]:
    """Which frames of a traceback are neither torch's nor Python's."""
    from titanlite.ranks.hang_state import is_plumbing

    frames = [frame for frame, _ in walk_tb(traceback)]
    return [n for n, frame in enumerate(frames) if not is_plumbing(frame.f_code.co_filename)]


class Debugging:
    """Opens the debugger in `rank`, or if that is None, in any rank."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def at_breakpoint(self, *_: Any, **__: Any) -> None:
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

    def at_error(self, rank: int, error: BaseException, traceback: Any) -> None:
        """Open the debugger at the line of a rank's error, in one of its tracebacks."""
        from titanlite.ranks.threads import thread_world

        if self.rank not in (None, rank):
            return
        print(f"rank {rank}: {type(error).__name__}: {error}")
        RankDebugger(rank, thread_world()).look_back(traceback)

    def at_end(self, rank: int, traceback: Any) -> None:
        """Open the debugger where a rank was waiting once no rank can go on, or one has failed."""
        from titanlite.ranks.threads import thread_world

        world = thread_world()
        # Without one, or with that of no rank, the user has stopped the run.
        failed, error = world.turns.failure or (-1, KeyboardInterrupt())
        if failed < 0 or isinstance(_first_cause(error), BdbQuit):
            return
        # Without --rank, the debugger has been open in the rank that failed.
        if self.rank == rank or (self.rank is None and world.stuck and failed == rank):
            why = f"rank {failed} has failed with {type(error).__name__}: {error}"
            print(f"no rank can go on; {error}" if world.stuck else why)
            print(f"rank {rank} was waiting here:")
            RankDebugger(rank, world).look_back(traceback)


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
        self._rank, self._world = rank, world

    def look_back(self, traceback: Any) -> None:
        """Open at the end of a traceback; the rank does not go on."""
        self.reset()
        self.interaction(None, traceback)

    def setup(self, frame: FrameType | None, traceback: Any) -> None:
        """Begin at the line of the model or the plan that led to an error, not inside of torch."""
        super().setup(frame, traceback)
        if traceback is not None and (places := _own_places(traceback)):
            self.curindex += places[-1] - len(list(walk_tb(traceback))) + 1
            self.curframe = self.stack[self.curindex][0]
            self.curframe_locals = self.curframe.f_locals

    def do_others(self, _: str) -> None:
        """others: where each rank is, and the collective or message that it waits for."""
        from titanlite.ranks.hang_state import UNKNOWN

        for rank, line in enumerate(self._world.describe().splitlines()):
            # After an error the thread of this rank runs nothing but the debugger.
            here = "is in this debugger" if rank == self._rank else "has not started"
            self.message(line.replace(f"is at {UNKNOWN}", here))
