"""Read and write schedules as CSV, in the format that PyTorch's pipelining reads.

A row is a rank and a cell is an action. A table may hold only compute actions, or communication
too. Empty cells are idle steps; they are dropped, because each action waits for its inputs anyway.
"""

import csv
import io
from pathlib import Path

from titanlite.files import read_bytes
from titanlite.schedule.actions import Action, Schedule, ScheduleError, parse_action

# About the size of a schedule of a thousand ranks with ten thousand actions each.
MOST_BYTES = 128 * 2**20


def read_csv(path: str | Path) -> Schedule:
    """Read the schedule at `path`; each stage belongs to the rank that holds its actions.

    Raises ScheduleError, which names the rank and cell that cannot be read, a stage found on two
    ranks, or a stage found on none. Does not check that the schedule runs; `check` does.
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
        raise ScheduleError(f"{path}: the file is empty; write one row per rank")
    rows = [_parse_row(path, rank, row) for rank, row in enumerate(table)]
    parts = [part for row in rows for action in row for part in action.parts]
    microbatches = [part.microbatch for part in parts if part.microbatch is not None]
    if not microbatches:
        raise ScheduleError(f"{path}: there is no compute action; add at least one, such as 0F0")
    num_microbatches, num_stages = 1 + max(microbatches), 1 + max(part.stage for part in parts)
    # A stage has at least two actions per microbatch. If most are missing, a number is probably a
    # typo, and listing every missing action could take forever.
    if num_microbatches * num_stages > 10 * len(parts):
        raise ScheduleError(
            f"{path}: {len(parts)} actions are too few for {num_stages} stages and "
            f"{num_microbatches} microbatches; number stages and microbatches from 0 up"
        )
    return Schedule(path.stem, num_microbatches, _place_stages(path, rows), rows)


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` to `path`, in a form that `read_csv` and PyTorch's `_load_csv` read."""
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
                        f"{rank}; put all its actions on one rank"
                    )
    missing = sorted(set(range(1 + max(place))) - place.keys())
    if missing:
        raise ScheduleError(f"{path}: no rank has stage {missing[0]}; number stages from 0 up")
    return tuple(place[stage] for stage in sorted(place))
