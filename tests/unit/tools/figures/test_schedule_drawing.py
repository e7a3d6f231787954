"""Every renderer draws every span, for computed and for measured times."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from fractions import Fraction

import browser
import pytest
from PIL import Image, ImageColor

from titanlite.schedule import Span, make_schedule
from titanlite.tools.figures.schedule_layout import Canvas, SpanBox, cells
from titanlite.tools.figures.schedule_png import draw_png
from titanlite.tools.figures.schedule_svg import draw_html, draw_svg
from titanlite.tools.figures.schedule_text import draw_text
from titanlite.tools.figures.timeline import Timeline, walk
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.planner.spans import read_trace
from titanlite.tools.simulate import Costs, Link, Network
from titanlite.tools.simulate.schemes import Workload, run_scheme

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def measured() -> Timeline:
    """A timeline like that of a real run: in seconds, and not starting at zero."""
    spans = [
        Span(0, 100.25, 100.5, "F", 0, 0),
        Span(1, 100.625, 100.875, "F", 1, 0),
        Span(1, 100.875, 101.25, "B", 1, 0),
        Span(0, 101.5, 102.25, "B", 0, 0),
    ]
    return Timeline("run <1>", ["rank 0", "rank 1"], spans, unit="s")


def test_svg_has_a_cell_for_each_action():
    timeline = walk(make_schedule("ZBV", 3, 6))
    root = ET.fromstring(draw_svg(timeline))
    titles = [e.text for e in root.iter(f"{SVG}title") if e.text.startswith("rank 1:")]
    assert len(titles) == 6 * 2 * 3
    assert "rank 1: forward, stage 1, microbatch 0; 1 to 2 steps" in titles
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert all(texts.count(f"{microbatch}") >= 3 * 2 * 3 for microbatch in range(6))
    assert {"rank 2", "idle"} <= set(texts)


def test_cells_are_where_their_times_are(measured):
    root = ET.fromstring(draw_svg(measured))
    cells = {
        cell.find(f"{SVG}title").text: cell
        for cell in root.iter(f"{SVG}rect")
        if cell.find(f"{SVG}title") is not None
    }
    assert len(cells) == 4
    first, second, third, fourth = (float(cell.get("x")) for cell in cells.values())
    assert (second - first) / (fourth - first) == pytest.approx(0.375 / 1.25, abs=1e-3)
    assert (third - first) / (fourth - first) == pytest.approx(0.625 / 1.25, abs=1e-3)
    assert any(name.endswith("100.25 to 100.5 s") for name in cells)


def test_bubble_of_measured_times(measured):
    assert measured.bubbles() == pytest.approx([0.5, 1 - 0.625 / 2])


def test_large_picture_stays_small_and_whole():
    timeline = walk(make_schedule("1F1B", 32, 96))
    picture = draw_svg(timeline)
    assert len(picture) < 500_000
    root = ET.fromstring(picture)
    cells = sum(
        len(re.findall("M", path.get("d")))
        for path in root.iter(f"{SVG}path")
        if path.get("fill", "none") != "none"
    )
    assert cells == 32 * 96 * 2


def test_pictures_under_each_other_share_their_scale():
    short, long = walk(make_schedule("GPipe", 2, 2)), walk(make_schedule("GPipe", 2, 8))
    root = ET.fromstring(draw_svg(short, long))
    widths = []
    for picture in root.findall(f"{SVG}svg"):
        first = next(r for r in picture.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None)
        widths.append(first.get("width"))
    assert len(widths) == 2
    assert widths[0] == widths[1]


def test_html_page_needs_nothing_else(measured):
    page = draw_html(measured)
    assert "run &lt;1&gt;" in page
    assert not re.search(r"(src|href)=", page)
    data = json.loads(re.search(r"const DATA = (.*);\n", page)[1])
    assert [len(row) for row in data[0]["rows"]] == [2, 2]
    assert data[0]["rows"][1][1][4].startswith("rank 1: backward, stage 1, microbatch 0")


def fully_sharded(**costs) -> Timeline:
    """FSDP with a network: workers compute, fetch weights and reduce gradients at once."""
    between = Link(Fraction(1, 10), Fraction(1, 2))
    costs = {"network": Network(between), "weight_units": 1, "reduce_gradients": True, **costs}
    return run_scheme("FSDP", Workload(6, 6, costs=Costs(**costs))).timeline()


def cell_at(cells: list[SpanBox], x: float, y: float) -> Span | None:
    """The foremost cell at a point."""
    for span, box in reversed(cells):
        if box.x <= x < box.x + box.width and box.y <= y < box.y + box.height:
            return span
    return None


def visible_points(timeline: Timeline) -> list[tuple[Span, float, float]]:
    """A point of each span of a picture that no other one covers, as near its middle as can be."""
    found = list(cells(Canvas.of(timeline)))
    points = []
    shares = [(i / 20, j / 20) for j in range(1, 20) for i in range(1, 20)]
    shares.sort(key=lambda share: max(abs(part - 0.5) for part in share))
    for span, box in found:
        inside = ((box.x + i * box.width, box.y + j * box.height) for i, j in shares)
        points.append((span, *next(at for at in inside if cell_at(found, *at) is span)))
    return points


def test_work_fetches_and_reductions_can_all_be_seen_and_hovered():
    timeline = fully_sharded()
    assert {span.kind for span, _, _ in visible_points(timeline)} == {
        "F",
        "B",
        "FETCH",
        "REDUCE_GRAD",
    }


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("costs", [{}, {"overlap_transfers": False, "activation_units": 1}])
def test_the_page_names_the_cell_under_the_pointer(tmp_path, costs):
    timeline = fully_sharded(**costs)
    path = tmp_path / "page.html"
    path.write_text(draw_html(timeline))
    points = visible_points(timeline)
    with browser.open_page(path) as page:
        for _ in range(2):
            told = page.run(
                f"""{[point[1:] for point in map(list, points)]}.map(([x, y]) => {{
                    const svg = document.querySelector('figure > svg');
                    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
                    svg.dispatchEvent(
                        new MouseEvent('mousemove', {{clientX: at.x, clientY: at.y}}));
                    return document.getElementById('tip').textContent;
                }})"""
            )
            assert told == [timeline.describe(span) for span, _, _ in points]
            page.click("#in")
        assert not page.errors


def test_trace_has_threads_spans_and_counters():
    timeline = walk(make_schedule("1F1B", 2, 4))
    events = json.loads(make_trace(timeline))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * 4 * 2
    assert {event["tid"] for event in spans} == {0, 1}
    assert sum(event["dur"] for event in spans) == 2 * 4 * 3 * 1000
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1"]
    assert any(event["ph"] == "C" for event in events)


def test_trace_of_seconds_is_in_microseconds(measured):
    spans = [e for e in json.loads(make_trace(measured))["traceEvents"] if e["ph"] == "X"]
    assert spans[0]["ts"] == 100.25e6
    assert spans[0]["dur"] == 0.25e6


def test_text_tells_the_microbatch_where_there_is_room():
    timeline = walk(make_schedule("1F1B", 2, 2))
    lines = draw_text(timeline, width=120, color=False).splitlines()
    assert lines[1].split()[2:4] == ["F0.0", "F0.1"]
    assert lines[2].startswith("rank 1 .....F1.0 B1.0")
    assert lines[-1].split() == ["0", "9", "steps", "idle"]


def test_text_fits_the_width():
    timeline = walk(make_schedule("Interleaved1F1B", 8, 32))
    for width in (60, 100, 160):
        lines = draw_text(timeline, width=width, color=False).splitlines()
        assert max(map(len, lines[1:-1])) <= width
        assert all("F" in line and "B" in line for line in lines[1:-1])


def test_coloured_text_paints_each_cell(measured):
    text = draw_text(measured, width=80, color=True)
    assert text.count("\033[0m") >= 4
    assert re.sub(r"\033\[[\d;]*m", "", text).splitlines()[1].startswith("rank 0 F")


@pytest.mark.parametrize("name", ["measured", "DualPipeV"])
def test_png_is_the_picture_of_the_svg(measured, tmp_path, name):
    timeline = measured if name == "measured" else walk(make_schedule(name, 2, 6))
    path = tmp_path / "a.png"
    draw_png(timeline, path)
    image = Image.open(path)
    canvas = Canvas.of(timeline)
    assert image.size == (round(2 * canvas.width), round(2 * canvas.height))
    for _, box in cells(canvas):
        corner = image.getpixel((round(2 * box.x) + 2, round(2 * box.y) + 2))
        assert corner == ImageColor.getrgb(box.fill)


def test_png_labels_every_cell_of_twelve_pixels(tmp_path):
    """Cells of one and two steps of 12.5 pixels: all have their labels; narrower ones do not."""
    timeline = walk(make_schedule("GPipe", 16, 104))
    scale = 2 * Canvas.of(timeline).scale
    assert 4 < scale < 9
    wide = replace(timeline, spans=[s for s in timeline.spans if s.end <= 24], until=120)
    canvas = Canvas.of(wide)
    path = tmp_path / "a.png"
    for factor in (12.5 / canvas.scale, 2 / canvas.scale):
        draw_png(wide, path, factor)
        image = Image.open(path).convert("L")
        labelled = 0
        for span, box in cells(canvas):
            edges = (box.x, box.y, box.x + box.width, box.y + box.height)
            darkest, lightest = image.crop([round(factor * edge) for edge in edges]).getextrema()
            labelled += lightest - darkest > 60 and span.kind in "FB"
        assert labelled == (len(wide.spans) if factor * canvas.scale > 12 else 0)


def test_text_shows_fetches_and_reductions_below_their_row():
    for color in (False, True):
        lines = draw_text(fully_sharded(), width=120, color=color).splitlines()
        names = [line.split()[0] for line in lines[2:-1]]
        assert names == ["rank", "fetch", "reduce"] * 6
        plain = [re.sub(r"\033\[[\d;]*m", "", line) for line in lines]
        assert max(map(len, plain[2:])) <= 120
    scale = (120 - len("rank 0 ") - len(" 100%")) / 19.6
    fetch = draw_text(fully_sharded(), width=120, color=False).splitlines()[3][7:]
    assert set(fetch) == {" ", "<"}
    # Rank 0 fetches stages 1 to 5 while it computes, from the start of the one before on.
    assert fetch[: round(0.6 * scale)] == "<" * round(0.6 * scale)
    assert fetch[round(0.7 * scale)] == " "
    assert fetch[round(1.1 * scale)] == "<"
    many = fully_sharded(prefetch=0, network=Network(Link(Fraction(1, 1000))))
    assert max(map(len, draw_text(many, 60, False).splitlines()[2:])) <= 60


def test_communication_has_lanes_below_the_work_and_tracks_of_its_own() -> None:
    spans = [
        Span(0, 0.0, 4.0, "F", 0, 0),
        Span(0, 1.0, 6.0, "SEND_TO"),
        Span(0, 2.0, 5.0, "RECEIVE"),
        Span(1, 1.0, 2.0, "REDUCE"),
    ]
    rows = ["rank 0 (dp_replicate 0, pp 0, tp 0)", "rank 1 (dp_replicate 0, pp 0, tp 1)"]
    timeline = Timeline("run", rows, spans, curves={row: [(0.0, 0)] for row in rows})
    assert timeline.lanes == ["SEND_TO", "RECEIVE", "REDUCE"]
    root = ET.fromstring(draw_svg(timeline))
    boxes = {}
    for cell in root.iter(f"{SVG}rect"):
        if (title := cell.find(f"{SVG}title")) is not None:
            top = float(cell.get("y"))
            boxes[title.text.partition(": ")[2].partition(";")[0]] = (
                top,
                top + float(cell.get("height")),
            )
    work, send, receive = (
        boxes[name]
        for name in ("forward, stage 0, microbatch 0", "send posted", "receive, with its wait")
    )
    assert work[1] <= send[0] < send[1] <= receive[0] < receive[1]
    assert receive[1] < boxes["reduction"][0]
    # Nothing is drawn outside the picture, long names of rows least of all.
    width = float(root.get("width"))
    for text in root.iter(f"{SVG}text"):
        start = float(text.get("x")) if text.get("x") else 0.0
        if text.get("text-anchor") == "start" and text.get("font-size"):
            assert start + 0.58 * float(text.get("font-size")) * len(text.text) <= width, text.text
    events = json.loads(make_trace(timeline))["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert [event["name"] for event in begun] == ["send posted", "receive", "reduction"]
    assert len(begun) == len([event for event in events if event["ph"] == "e"])


def test_a_trace_is_read_as_it_was_written():
    spans = [
        Span(0, 0.5, 2.0, "F", 0, 0),
        Span(1, 2.0, 3.5, "I", 1, 0),
        Span(1, 3.5, 4.0, "W", 1, 0),
        Span(0, 0.0, 0.5, "FETCH", 0),
        Span(0, 2.0, 2.5, "SEND_TO"),
        Span(1, 1.0, 2.5, "RECEIVE"),
        Span(0, 4.0, 5.0, "end of the step"),
    ]
    timeline = Timeline("run <1>", ["rank 0", "rank 1"], spans, unit="ms")
    read = read_trace(make_trace(timeline))
    assert (read.title, read.rows, read.unit) == (timeline.title, timeline.rows, "ms")
    assert sorted(read.spans, key=str) == sorted(spans, key=str)
    in_seconds = Timeline("", ["rank 0"], [Span(0, 0.25, 0.5, "B", 0, 0)], unit="s")
    assert read_trace(make_trace(in_seconds)).spans == [Span(0, 250.0, 500.0, "B", 0, 0)]


@pytest.mark.parametrize("text", ["[model]", "{}", "[]", '{"traceEvents": [{"name": 1}]}'])
def test_other_files_are_no_traces(text):
    with pytest.raises(ValueError, match=r"trace|Expecting"):
        read_trace(text)
