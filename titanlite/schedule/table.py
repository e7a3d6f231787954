"""Schedules as CSV, a row a rank and a cell an action: the format PyTorch's pipelining reads.

A table may hold compute actions alone or everything a rank does; empty cells are idle steps,
which carry no information once actions wait for what they need, and are dropped.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from titanlite.files import read_bytes
from titanlite.schedule.actions import Action, Schedule, ScheduleError, parse_action

# A schedule of a thousand ranks and ten thousand actions on each takes about as much.
MOST_BYTES = 128 * 2**20


def read_csv(path: str | Path) -> Schedule:
    """The schedule stored at `path`; stages are placed where their actions are.

    Raises ScheduleError naming the rank and cell that cannot be read, a stage that two ranks
    claim, and one that nobody has. Whether the schedule can run is for `check` to say.
    """
    path = Path(path)
    try:
        content = read_bytes(path, most_bytes=MOST_BYTES)
        table = list(csv.reader(io.StringIO(content.decode("utf-8"), newline="")))
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: cannot be read ({error})") from error
    if not table:
        raise ScheduleError(f"{path}: is empty; a schedule has one row a rank")
    rows = [_parse_row(path, rank, row) for rank, row in enumerate(table)]
    parts = [part for row in rows for action in row for part in action.parts]
    microbatches = [part.microbatch for part in parts if part.microbatch is not None]
    if not microbatches:
        raise ScheduleError(f"{path}: holds no compute action")
    num_microbatches, num_stages = 1 + max(microbatches), 1 + max(part.stage for part in parts)
    # Each stage has two actions a microbatch at least. Where most are missing, naming them would
    # take as long as somebody's numbers are large.
    if num_microbatches * num_stages > 10 * len(parts):
        raise ScheduleError(
            f"{path}: has {len(parts)} actions for {num_stages} stages and {num_microbatches} "
            "microbatches, which are too few; number both from 0 up"
        )
    return Schedule(path.stem, num_microbatches, _place_stages(path, rows), rows)


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Store `schedule` at `path`, so that `read_csv` and PyTorch's `_load_csv` give it back."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(schedule.actions)


def _parse_row(path: Path, rank: int, row: list[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row):
        try:
            action = parse_action(cell)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: rank {rank}, cell {column}: {error}") from None
        if action is not None:
            actions.append(action)
    return actions


def _place_stages(path: Path, rows: list[list[Action]]) -> tuple[int, ...]:
    place: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.parts:
                if place.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{path}: stage {part.stage} is on rank {place[part.stage]} and on rank "
                        f"{rank}; a stage has one rank"
                    )
    missing = sorted(set(range(1 + max(place))) - place.keys())
    if missing:
        raise ScheduleError(f"{path}: no rank has stage {missing[0]}; stages count from 0 up")
    return tuple(place[stage] for stage in sorted(place))
