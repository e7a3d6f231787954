"""Write the table of docs/learn.md: `python docs/make_learn.py`. It measures on four ranks."""

from __future__ import annotations

from pathlib import Path

from titanlite.tools.learn.command import show_number
from titanlite.tools.learn.topics import TOPICS, Numbers, Runs

PAGE = Path(__file__).parent / "learn.md"
HEADER = (
    "| topic | question | formula | value of the formula | simulated | measured | command |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def row(name: str, numbers: Numbers) -> str:
    topic = TOPICS[name]
    cells = (
        f"[{topic.title}]({topic.page})",
        topic.question,
        topic.formula,
        f"{show_number(numbers.formula)} {numbers.unit} ({numbers.of})",
        show_number(numbers.simulated),
        show_number(numbers.measured),
        f"`titanlite learn {name}`",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    runs = Runs(tuple(job for topic in TOPICS.values() for job in topic.jobs))
    table = "\n".join([*HEADER, *(row(name, topic.run(runs)) for name, topic in TOPICS.items())])
    runs.close()
    before, _, after = PAGE.read_text().partition(HEADER[0])
    PAGE.write_text(before + table + "\n\n" + after.partition("\n\n")[2])
