"""`titanlite learn` without ranks: its pictures, what docs/learn.md shows, mistakes."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from titanlite.cli import main
from titanlite.tools.figures.chart import ChartAxis, ReferenceLine, Series, draw_chart
from titanlite.tools.learn.command import answer, show_number
from titanlite.tools.learn.curves import (
    PICTURES,
    data_parallel_limit,
    load_hardware,
    tensor_parallel_seconds,
)
from titanlite.tools.learn.ladder.scripts import main as ladder
from titanlite.tools.learn.topics import TOPICS, Numbers

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "learn.md").read_text()
PLANNED = ("zero", "recomputation")  # pictures whose points are traced: a slow test draws them
picture_commands = runpy.run_path(str(DOCS / "make_pictures.py"))["picture_commands"]


def test_an_answer_shows_all_three_numbers():
    topic = TOPICS["pp"]
    lines = answer(topic, Numbers(27.25, 27.5, 1234.5, "%", "1F1B")).splitlines()
    assert lines[0] == topic.question
    shown = [line.split(maxsplit=1)[1] for line in lines[3:6]]
    assert shown == ["27.25 %", "27.5 %", "1,234 %"]


def test_page_shows_every_picture_with_its_command():
    commands = picture_commands(DOCS / "learn.md")
    assert sorted(command[1] for command in commands) == sorted(PICTURES)
    for command in commands:
        assert command[-1] == f"docs/images/learn/{command[1]}.svg"
        assert f"]({command[-1].removeprefix('docs/')})" in PAGE


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in PLANNED])
def test_picture_is_what_its_command_draws(name, tmp_path):
    assert main(["learn", name, "--svg", str(tmp_path / "picture.svg")]) == 0
    shown = DOCS / "images" / "learn" / f"{name}.svg"
    drawn, shown = (
        re.findall(r"<text.*>", p.read_text()) for p in (tmp_path / "picture.svg", shown)
    )
    # Other versions of matplotlib place texts elsewhere.
    plain = [[re.sub(r"<[^>]*>", "", text) for text in texts] for texts in (drawn, shown)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        ("titanlite ladder 1d-overlap --columns 100", r"^dimensions .*(?:\n.+  .*){4}"),
        ("titanlite simulate 1F1B --workers 4 --batches 8 --label batch", r"(?:^rank .*\n){4}"),
    ],
)
def test_page_shows_what_a_command_prints(command, pattern, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert f"```\n{command}\n```\n" in PAGE
    assert main(command.split()[1:]) == 0
    assert re.search(pattern, capsys.readouterr().out, flags=re.MULTILINE)[0] in PAGE


def test_first_step_draws_what_the_page_shows(capsys):
    assert "```\ntitanlite ladder 0d --items 4\n```\n" in PAGE
    assert ladder(["0d", "--items", "4", "--columns", "100"]) == 0
    assert capsys.readouterr().out.split("\n\n")[0] in PAGE


def test_page_has_a_row_for_each_topic():
    rows = [line for line in PAGE.splitlines() if "| `titanlite learn " in line]
    assert len(rows) == len(TOPICS)
    for row, (name, topic) in zip(rows, TOPICS.items(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert cells[:3] == [f"[{topic.title}]({topic.page})", topic.question, topic.formula]
        assert cells[-1] == f"`titanlite learn {name}`"
        assert (DOCS / topic.page).exists()


def test_limits_are_those_of_the_page():
    """Twice as many bytes per second halve the limit; the page has both links of an H100."""
    h100 = load_hardware("h100")
    for rate, tokens in ((h100.node.bytes_per_second, 1465), (h100.fabric.bytes_per_second, 13187)):
        limit = data_parallel_limit(h100, rate)
        assert round(limit) == tokens
        assert f"{tokens:,} " in PAGE
        # At the limit, 6 P t operations take as long as sending 2 x 2 P bytes.
        assert 6 * limit / h100.peak("bfloat16") == pytest.approx(4 / rate)


def test_tensor_parallelism_ends_at_the_node():
    h100 = load_hardware("h100")
    compute, sent = tensor_parallel_seconds(h100, 8, 8192)
    assert sent < compute
    compute, sent = tensor_parallel_seconds(h100, 16, 8192)
    assert 14 < sent / compute < 16
    doubled = tensor_parallel_seconds(h100, 16, 16384)
    assert doubled == pytest.approx((2 * compute, 2 * sent))


def test_without_a_topic_all_are_listed(capsys):
    assert main(["learn"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(
        f"{name} " in printed and topic.question in printed for name, topic in TOPICS.items()
    )


def test_numbers_are_written_with_their_digits():
    assert show_number(1572864.0) == "1,572,864"
    assert show_number(27.2727) == "27.27"
    assert show_number(1234.5) == "1,234"


def test_chart_places_points_by_their_values():
    chart = draw_chart(
        "Title <1>",
        [Series("line", [(1, 10), (100, 1000)]), Series("points", [(10, 100)], "points", 1)],
        ChartAxis("x", is_log=True),
        ChartAxis("y", is_log=True),
        markers=[ReferenceLine("here", x=10), ReferenceLine("there", y=100)],
    )
    root = ElementTree.fromstring(chart)
    space = "{http://www.w3.org/2000/svg}"
    line, points = (next(root.iter()).find(f".//*[@id='{name}']") for name in ("line", "points"))
    ends = line.find(f"{space}path").get("d").replace("M", "").replace("L", "").split()
    x1, y1, x2, y2 = map(float, ends)
    point = points.find(f".//{space}use")
    # On logarithmic axes, (10, 100) is halfway between (1, 10) and (100, 1000).
    assert float(point.get("x")) == pytest.approx((x1 + x2) / 2, abs=0.1)
    assert float(point.get("y")) == pytest.approx((y1 + y2) / 2, abs=0.1)
    texts = [text.text for text in root.iter(f"{space}text")]
    assert {"Title <1>", "here", "there", "line", "points", "x", "y", "10", "100"} <= set(texts)
