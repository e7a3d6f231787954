"""Judging an answer: it runs on real ranks, and its results and its record are compared.

An answer is wrong in one of these ways, looked for in this order: it raises, its messages do not
fit together (diagnosis.py), its result differs, it changes its arguments, it uses a forbidden
collective, or it sends too much. The verdict also has the first step in which its messages differ
from those of the worked solution.
"""

import copy
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.errors import ConfigError, RankError
from titanlite.observe.terminal import folded
from titanlite.tools.lab.cluster import VirtualCluster
from titanlite.tools.lab.device import VirtualDevice
from titanlite.tools.lab.diagnosis import CommunicationError
from titanlite.tools.lab.exercises import EXERCISES
from titanlite.tools.lab.exercises.exercise import Exercise, load_answer, load_exercise
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.pictures import Record, describe, name_parts, parts_of
from titanlite.tools.lab.record import Message
from titanlite.tools.options import write

PASSED, UNWRITTEN, ERROR, VALUE, CHANGED = "passed", "unwritten", "error", "value", "changed"
FORBIDDEN, MESSAGES, BYTES, STEPS = "forbidden", "messages", "bytes", "steps"


@dataclass(frozen=True)
class Verdict:
    """`kind` is PASSED or what is wrong (also a kind of CommunicationError); `lines` explain it."""

    kind: str
    lines: tuple[str, ...]
    record: Record | None = None

    @property
    def is_passed(self) -> bool:
        return self.kind == PASSED


def judge(cluster: VirtualCluster, exercise: Exercise, answer: Callable[..., Any]) -> Verdict:
    """Run an answer on the cluster, whose mesh is set to that of the exercise."""
    cluster.mesh = exercise.mesh
    _run(cluster, exercise, exercise.solution)
    model, allowed = cluster.record, _costs(cluster)
    try:
        results = _run(cluster, exercise, answer)
    except CommunicationError as error:
        where = _first_difference(exercise, error.record, model)
        return Verdict(error.kind, (str(error), *where), error.record)
    except RankError as error:
        return Verdict(ERROR, (f"{error}{_line_of(error, exercise.name)}",))
    record = cluster.record
    expected = exercise.expected([exercise.inputs(rank) for rank in range(exercise.mesh.size)])
    for rank, ((mine, changed), right) in enumerate(zip(results, expected, strict=True)):
        if isinstance(mine, _Unwritten):
            text = f"{mine.text}; `titanlite lab exercise {exercise.name} --hint` shows a hint"
            return Verdict(UNWRITTEN, (text,), record)
        difference = _difference(mine, right)
        if difference:
            where = _first_difference(exercise, record, model)
            return Verdict(VALUE, (f"rank {rank} {difference}", *where), record)
        if changed:
            text = f"rank {rank} changes its arguments in place; make a copy first"
            return Verdict(CHANGED, (text,), record)
    counts = cluster.counts
    used = {collective.kind for collective in counts.collectives} | set(counts.torch_collectives)
    for kind in exercise.forbidden:
        if kind in used:
            text = f"calls {kind}, which this exercise has to do without; see the docstring"
            return Verdict(FORBIDDEN, (text,), record)
    spent = _costs(cluster)
    for kind, number in spent.items():
        if number > allowed[kind]:
            verb = "takes" if kind == STEPS else "sends"
            text = f"the result is right, but it {verb} {number} {kind}; {allowed[kind]} are enough"
            return Verdict(kind, (text, *_first_difference(exercise, record, model)), record)
    costs = ", ".join(f"{number} {kind}" for kind, number in spent.items())
    return Verdict(PASSED, (f"right on all {exercise.mesh.size} ranks: {costs}",), record)


def judge_all(folder: Path) -> dict[Exercise, Verdict]:
    """Judge the NAME.py of every exercise. One that cannot be loaded is wrong."""
    verdicts = {}
    with VirtualCluster(Mesh(rank=8)) as cluster:
        for exercise in map(load_exercise, EXERCISES):
            try:
                answer = load_answer(folder / f"{exercise.name}.py", exercise.name)
                verdicts[exercise] = judge(cluster, exercise, answer)
            except ConfigError as error:
                verdicts[exercise] = Verdict(ERROR, (str(error),))
    return verdicts


def report(verdicts: dict[Exercise, Verdict], path: Path | None) -> int:
    """Write the points to `path` as JSON, print the verdicts, and return the exit status."""
    if path is not None:
        rows = [
            {"name": each.name, "points": each.points, "passed": verdict.is_passed}
            for each, verdict in verdicts.items()
        ]
        write(path, json.dumps(rows, indent=1) + "\n")
    for each, verdict in verdicts.items():
        print(f"{each.name}: {'' if verdict.is_passed else 'not yet: '}{verdict.kind}")
        print(folded("\n".join(f"  {line}" for line in verdict.lines), sys.stdout, "  "))
    return 0 if all(verdict.is_passed for verdict in verdicts.values()) else 1


class _Unwritten:
    """The result of an answer that raises NotImplementedError."""

    def __init__(self, text: str) -> None:
        self.text = text


def _run(cluster: VirtualCluster, exercise: Exercise, answer: Callable[..., Any]) -> list[Any]:
    """The result of each rank, and whether it changed its arguments."""
    arguments = [exercise.inputs(rank) for rank in range(exercise.mesh.size)]

    def job(device: VirtualDevice) -> Any:
        own = arguments[device.rank]
        copies = copy.deepcopy(own)
        try:
            return answer(device, *own), bool(_difference(list(own), list(copies)))
        except NotImplementedError as error:
            return _Unwritten(str(error)), False

    return cluster.run(job, algorithm=exercise.algorithm, record=True, timeout_seconds=20)


def _costs(cluster: VirtualCluster) -> dict[str, int]:
    """What the last run has sent, and how long it took."""
    record = cluster.record
    counts = len(record.messages), cluster.counts.d2d_bytes, record.steps.length
    return dict(zip((MESSAGES, BYTES, STEPS), counts, strict=True))


def _first_difference(exercise: Exercise, record: Record, model: Record) -> list[str]:
    """The first step in which messages differ from those of the worked solution, if one does."""
    mine, theirs = _by_step(record, exercise), _by_step(model, exercise)
    for step in range(max([*mine, *theirs], default=-1) + 1):
        here, there = mine.get(step, {}), theirs.get(step, {})
        for rank in range(exercise.mesh.size):
            if here.get(rank) != there.get(rank):
                return [
                    f"the first difference is in step {step}: rank {rank} "
                    f"{here.get(rank, 'sends nothing')}; in the worked solution, it "
                    f"{there.get(rank, 'sends nothing')}"
                ]
    return []


def _by_step(record: Record, exercise: Exercise) -> dict[int, dict[int, str]]:
    """What each rank sends, by step and rank, as text."""
    found: dict[int, dict[int, str]] = {}
    for flight in record.steps.flights:
        message = flight.message
        text = f"sends {_name(message, exercise)} to rank {message.target}"
        found.setdefault(flight.start, {})[message.source] = text
    return found


def _name(message: Message, exercise: Exercise) -> str:
    if exercise.num_parts and message.tensor.values is not None:
        try:
            return name_parts(parts_of(message.tensor.values), exercise.num_parts)
        except ValueError:
            pass
    return f"{describe(message.tensor)} ({message.tensor.dtype})"


def _difference(mine: Any, right: Any, place: str = "returns") -> str:
    """How a result differs from the expected one; empty if it does not."""
    if isinstance(right, torch.Tensor):
        if not isinstance(mine, torch.Tensor):
            return f"{place} {_show(mine)}, not a tensor of shape {tuple(right.shape)}"
        if mine.shape != right.shape:
            return f"{place} a tensor of shape {tuple(mine.shape)}, not {tuple(right.shape)}"
        if mine.dtype != right.dtype:
            return f"{place} a tensor of {mine.dtype}, not {right.dtype}"
        if not torch.allclose(mine, right):
            return f"{place} {_show(mine)}, not {_show(right)}"
        return ""
    if isinstance(right, (list, tuple)):
        if not isinstance(mine, (list, tuple)):
            return f"{place} {_show(mine)}, not {len(right)} values"
        if len(mine) != len(right):
            return f"{place} {len(mine)} values, not {len(right)}"
        pairs = enumerate(zip(mine, right, strict=True))
        differences = (_difference(a, b, f"{place}, as value {i},") for i, (a, b) in pairs)
        return next((one for one in differences if one), "")
    if isinstance(right, float) and isinstance(mine, (int, float)):
        is_equal = math.isclose(mine, right, rel_tol=1e-9, abs_tol=1e-12)
    else:
        is_equal = type(mine) is type(right) and mine == right
    return "" if is_equal else f"{place} {_show(mine)}, not {_show(right)}"


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = str(value.tolist())
        return text if len(text) <= 90 else f"{text[:90]}... of shape {tuple(value.shape)}"
    return repr(value)[:120]


def _line_of(error: RankError, name: str) -> str:
    """The line of the answer in a rank's traceback."""
    pattern = rf'File ".*?([^/"]+)", line (\d+), in {name}\b'
    lines: Sequence[str] = re.findall(pattern, error.rank_traceback)
    return f" (at {lines[-1][0]}:{lines[-1][1]})" if lines else ""
