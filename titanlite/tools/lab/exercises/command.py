"""`titanlite lab exercise`: list the exercises, start, judge, and explain one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanlite.errors import ConfigError
from titanlite.observe.terminal import telling
from titanlite.tools.lab.exercises import EXERCISES
from titanlite.tools.lab.exercises.exercise import Exercise, load_answer, load_exercise
from titanlite.tools.options import CommandParser, fitted, write


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if the answer is right or nothing was judged, 1 if it is wrong."""
    parser = CommandParser(
        prog="titanlite lab exercise",
        description="Exercises of the lab's notes, judged on real ranks. "
        "Without a name, all are listed.",
    )
    add = parser.add_argument
    add("name", nargs="?", help="the exercise; or all, judged from a folder")
    add("file", nargs="?", type=Path, help="the file with your function; or a folder of NAME.py")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--start", action="store_true", help="write a skeleton to the file")
    actions.add_argument("--hint", action="store_true", help="show a hint")
    actions.add_argument("--solution", action="store_true", help="show the worked solution")
    add("--picture", type=Path, metavar="FILE.svg", help="draw your messages; with .html, a page")
    add("--json", type=Path, metavar="FILE", help="write points, for a grader")
    options = parser.parse_args(arguments)
    if options.name is None:
        if options.start or options.hint or options.solution or options.picture or options.json:
            raise ConfigError("exercise: name one; `titanlite lab exercise` lists them")
        rows = [f"  {name:18} note {note}: {text}" for name, (note, text) in EXERCISES.items()]
        after = """`titanlite lab exercise NAME FILE --start` writes a file to start from. Without
--start, it judges the file. --hint and --solution help."""
        print(fitted("\n".join([*rows, "", after])))
        return 0

    if options.name == "all":
        if options.file is None or options.start or options.picture:
            raise ConfigError("exercise: all takes a folder with a NAME.py for each, and --json")
        from titanlite.tools.lab.exercises.judge import judge_all, report

        return report(judge_all(options.file), options.json)
    exercise = load_exercise(options.name)
    if options.hint or options.solution:
        if options.file is not None or options.picture is not None or options.json is not None:
            raise ConfigError("exercise: --hint and --solution take no file")
        print(exercise.hint if options.hint else exercise.solution_text, end="\n" * options.hint)
        return 0
    if options.file is None:
        raise ConfigError(
            f"exercise: name the file of your function, such as {options.name}.py; with --start, "
            "it is written"
        )
    if options.start:
        return _start(options.file, exercise.skeleton, options.name)
    return _judge(exercise, options)


def _start(path: Path, skeleton: str, name: str) -> int:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(skeleton)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; choose another file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"{path} has the task. When it is done: titanlite lab exercise {name} {path}")
    return 0


def _judge(exercise: Exercise, options: argparse.Namespace) -> int:
    if options.picture is not None and options.picture.suffix not in (".svg", ".html"):
        raise ConfigError(f"--picture: {options.picture} must end in .svg or .html")
    with telling("judging it on real ranks"):
        from titanlite.tools.lab.cluster import VirtualCluster
        from titanlite.tools.lab.exercises.judge import judge, report

        answer = load_answer(options.file, exercise.name)
        with VirtualCluster(exercise.mesh) as cluster:
            verdict = judge(cluster, exercise, answer)
    if options.picture is not None and verdict.record is not None:
        title = f"{exercise.name}, as in {options.file.name}"
        record = verdict.record
        drawn = record.svg(title) if options.picture.suffix == ".svg" else record.html(title)
        write(options.picture, drawn)
    status = report({exercise: verdict}, options.json)
    if options.picture is not None:
        if verdict.record is None:
            raise ConfigError("--picture: the run was not recorded to its end")
        print(f"  {options.picture} shows its messages")
    return status
