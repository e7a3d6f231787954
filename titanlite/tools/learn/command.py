"""`titanlite learn`: a topic's question, formula, and its number simulated and measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from titanlite.errors import ConfigError
from titanlite.observe.terminal import folded, telling
from titanlite.tools.learn.curves import PICTURES
from titanlite.tools.learn.topics import TOPICS, Numbers, Runs, Topic
from titanlite.tools.options import CommandParser, choice, fitted, write


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = CommandParser(
        prog="titanlite learn",
        description="For a topic of parallel training: a question, its formula, and the number "
        "that the formula gives, simulated and measured on this machine. docs/learn.md explains.",
    )
    topics = f"of {', '.join(TOPICS)}, or all; default: list"
    kind = choice([*TOPICS, "ladder", "all"])
    parser.add_argument("topics", nargs="*", type=kind, metavar="topic", help=topics)
    parser.add_argument("--svg", metavar="FILE", help=f"draw one of {', '.join(PICTURES)} instead")
    options = parser.parse_args(arguments)
    if options.svg:
        if len(options.topics) != 1 or options.topics[0] not in PICTURES:
            raise ConfigError(
                f"--svg: name one picture, of {', '.join(PICTURES)}, and nothing else"
            )
        print(write(options.svg, PICTURES[options.topics[0]]()))
        return 0
    names = list(TOPICS) if "all" in options.topics else options.topics
    if "ladder" in names:
        raise ConfigError("topic: ladder is a picture; name its file with --svg")
    if not names:
        rows = (f"  {name:15}{topic.question}" for name, topic in TOPICS.items())
        after = "`titanlite learn TOPIC` answers one, `all` all; docs/learn.md explains them."
        print(fitted("\n".join([*rows, "", after])))
        return 0
    runs = Runs(tuple(job for name in names for job in TOPICS[name].jobs))
    try:
        for number, name in enumerate(names):
            with telling(f"{name}: simulating it, and measuring it on four ranks"):
                numbers = TOPICS[name].run(runs)
            text = folded(answer(TOPICS[name], numbers), sys.stdout, " " * 13)
            print("\n" * (number > 0) + text, flush=True)
    finally:
        runs.close()
    return 0


def answer(topic: Topic, numbers: Numbers) -> str:
    lines = [
        topic.question,
        f"  formula    {topic.formula}",
        f"  of         {numbers.of}",
        f"  gives      {show_number(numbers.formula)} {numbers.unit}",
        f"  simulated  {show_number(numbers.simulated)} {numbers.unit}",
        f"  measured   {show_number(numbers.measured)} {numbers.unit}",
        f"  more       docs/{topic.page}",
    ]
    return "\n".join(lines)


def show_number(value: float) -> str:
    """A whole number with its digits in groups, others with three or four digits."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
