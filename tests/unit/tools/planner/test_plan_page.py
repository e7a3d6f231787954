"""The page of a plan and of a search: what it contains, and how it behaves in a browser."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import browser
import pytest

from titanlite.config import JobConfig, resolve_job
from titanlite.tools.planner.evaluate import FoundPlan
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.html import draw_page
from titanlite.tools.planner.planning import PIECES, plan_job
from titanlite.tools.planner.report import figures
from titanlite.tools.planner.search import SearchResult
from titanlite.tools.planner.search_report import search_figures
from titanlite.tools.planner.spans import StepSpan, step_spans

needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no chromium")


def found_plans() -> dict[str, Any]:
    """A search in which more memory buys speed, with some plans that are beaten in both."""
    plans = []
    for number, (tp, mode) in enumerate(itertools.product((1, 2, 4, 8), ("none", "full"))):
        rate = 900.0 - 40 * tp - (150 if mode == "full" else 0)
        plans.append(
            {
                "changes": {
                    "parallelism.tensor_parallel_degree": tp,
                    "parallelism.pipeline_parallel_schedule": "1F1B" if tp > 2 else "GPipe",
                    "activation_checkpoint.mode": mode,
                },
                "tokens_per_second": rate,
                "seconds": 1e4 / rate,
                "peak_bytes": (60 // tp + (0 if mode == "full" else 12)) * 2**30,
                "mfu": None if number == 3 else rate / 2000,
                "bubble": 0.05,
                "bound": "matrix products take 60% of the step",
                "host_bytes": 7 * 2**30 if number == 5 else 0,
            }
        )
    dropped = {"do not fit in memory": 1200}
    return {"plans": plans, "memory_bytes": 80e9, "num_candidates": 1208, "dropped": dropped}


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const DATA = (.*);$", page, flags=re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_all_data_and_loads_nothing() -> None:
    spans = [
        StepSpan(0, "compute", 0.0, 1e-3, "forward of </script><b>", "forward"),
        StepSpan(0, "pp", 0.0, 1e-3, "send it", "send"),
        StepSpan(0, "pp", 0.0, 2e-3, "receive it", "receive"),
    ]
    page = draw_page(None, spans, found_plans(), title="a & <b>")
    assert "<title>a &amp; &lt;b></title>".replace("b>", "b&gt;") in page
    assert page.count("</script>") == 1
    links = set(re.findall(r"https?://[^'\"\s]*", page))
    assert links == {"http://www.w3.org/2000/svg"}
    data = data_of(page)
    assert data["search"] == found_plans()
    assert data["plan"] is None
    rows = {row["stream"]: row for row in data["rows"]}
    assert set(rows) == {"compute", "pp send", "pp receive"}
    start, end, name, kind, _ = rows["compute"]["spans"][0]
    assert (start, end) == (0, 1_000_000)
    assert data["names"][name] == "forward of </script><b>"
    assert data["names"][kind] == "forward"


def test_values_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        draw_page(None, search={"plans": [{"mfu": float("nan")}]})


def test_a_search_is_shown_as_it_was_found() -> None:
    found = FoundPlan({"parallelism.tensor_parallel_degree": 2}, 10**9, 0.5, 200.0, 0.4, 0.1, "why")
    result = SearchResult(num_candidates=3, found=[found], is_complete=True)
    result.dropped["does not fit"] += 2
    search = search_figures(result, load_hardware("h100"))
    assert data_of(draw_page(search=search))["search"] == {
        "most_tokens_per_second": None,
        "num_candidates": 3,
        "is_complete": True,
        "dropped": {"does not fit": 2},
        "memory_bytes": load_hardware("h100").memory.num_bytes,
        "plans": [
            {
                "changes": {"parallelism.tensor_parallel_degree": 2},
                "peak_bytes": 10**9,
                "seconds": 0.5,
                "tokens_per_second": 200.0,
                "mfu": 0.4,
                "bubble": 0.1,
                "bound": "why",
                "host_bytes": 0,
            }
        ],
    }


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """The page of a pipelined job with CPU offload, and of a search, in a browser."""
    config = JobConfig.from_dict(
        {
            "model": {"flavor": "debug"},
            "job": {"device": "cuda"},
            "training": {
                "dataset": "synthetic",
                "global_batch_size": 16,
                "local_batch_size": 8,
                "enable_cpu_offload": True,
            },
            "parallelism": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2},
        }
    )
    device = load_hardware("h100")
    plan = plan_job(resolve_job(config, None), device, method=PIECES, use_cache=False)
    plan.warnings.append("it is only a test")
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(draw_page(figures(plan), step_spans(plan), found_plans(), title="a job"))
    with browser.open_page(path) as opened:
        yield opened


@pytest.fixture
def page(opened: browser.Page) -> Iterator[browser.Page]:
    opened.reload()
    yield opened
    assert opened.errors == []


@pytest.mark.slow
@needs_browser
def test_it_opens_with_all_sections(page: browser.Page) -> None:
    assert page.errors == []
    sections = page.run("[...document.querySelectorAll('section')].map(one => one.id)")
    assert sections == ["memory", "host", "time", "axes", "timeline", "search"]
    text = page.run("document.body.innerText")
    assert "4 ranks: pp 2 x dp_shard 2, on NVIDIA H100" in text
    assert "Warning: it is only a test." in text
    assert "8 of 1,208 plans fit and were timed." in text
    # Every bar of the memory is as long as its share.
    bars = page.run("document.querySelectorAll('#memory rect').length")
    assert bars > 6
    hosts = page.run("document.querySelector('#host').innerText")
    assert "optimizer state" in hosts
    assert "activations" not in hosts
    assert not page.run("/NaN|undefined|Infinity/.test(document.querySelector('main').innerHTML)")


@pytest.mark.slow
@needs_browser
def test_the_bars_name_what_is_under_the_mouse(page: browser.Page) -> None:
    x, y = page.place("#memory rect:nth-of-type(2)")
    page.mouse("mouseMoved", x, y)
    tip = page.run("document.getElementById('tip').textContent")
    assert tip.startswith("rank 0: parameters")
    assert "of the peak" in tip


@pytest.mark.slow
@needs_browser
def test_the_timeline_zooms_moves_and_names(page: browser.Page) -> None:
    labels = "[...document.querySelectorAll('#timeline text')].map(one => one.textContent)"
    ticks = f"{labels}.filter(text => / (s|ms|us)$/.test(text))"
    whole = page.run(ticks)
    x, y = page.place("#timeline svg", 0.3, 0.12)
    page.mouse("mouseMoved", x, y)
    assert "microbatch" in page.run("document.getElementById('tip').textContent")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-800)
    zoomed = page.run(ticks)
    assert zoomed != whole
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 200, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 200, y, button="left")
    assert page.run(ticks) != zoomed
    page.click("#whole")
    assert page.run(ticks) == whole
    page.click("#in")
    assert page.run(ticks) != whole
    page.click("#whole")


SHOWN = "[...document.querySelectorAll('#search tbody tr')].map(row => row.innerText.split('\\t'))"


def type_filter(page: browser.Page, text: str) -> list[list[str]]:
    page.run(
        "(() => { const one = document.getElementById('filter');"
        f"one.value = {json.dumps(text)}; one.dispatchEvent(new Event('input')); }})()"
    )
    rows: list[list[str]] = page.run(SHOWN)
    return rows


@pytest.mark.slow
@needs_browser
def test_the_table_filters_and_sorts(page: browser.Page) -> None:
    columns = page.run("[...document.querySelectorAll('#search th')].map(one => one.innerText)")
    tp, memory = columns.index("tp"), columns.index("memory")
    assert [float(row[0]) for row in type_filter(page, "")] == sorted(
        (one["tokens_per_second"] for one in found_plans()["plans"]), reverse=True
    )
    assert {row[tp] for row in type_filter(page, "tp=8")} == {"8"}
    assert {row[tp] for row in type_filter(page, "1f1b none")} == {"4", "8"}
    small = type_filter(page, "memory<20")
    assert sorted(row[memory] for row in small) == ["15 GiB", "19 GiB", "7 GiB"]
    assert type_filter(page, "tp>8") == []
    assert "0 of 8 plans" in page.run("document.getElementById('told').textContent")
    type_filter(page, "")
    page.click(f"#search th:nth-child({memory + 1})")
    page.click(f"#search th:nth-child({memory + 1})")
    order = [float(row[memory].split()[0]) for row in page.run(SHOWN)]
    assert order == sorted(order)
    page.click("#only-front")
    front = page.run(SHOWN)
    page.click("#only-front")
    rates = [float(row[0]) for row in front]
    # On the front, more memory is more speed.
    assert 1 < len(front) < 8
    assert rates == sorted(rates)


@pytest.mark.slow
@needs_browser
def test_a_click_shows_a_plan(page: browser.Page) -> None:
    type_filter(page, "tp=4 none")
    page.click("#search tbody tr:nth-child(1) td")
    text = page.run("document.getElementById('detail').innerText")
    assert "[parallelism]\ntensor_parallel_degree = 4" in text
    assert 'mode = "none"' in text
    assert "matrix products take 60%" in text
    assert "of its host" not in text
    assert page.run("document.querySelectorAll('tr.selected').length") == 1
    type_filter(page, "host>6")
    page.click("#search tbody tr:nth-child(1) td")
    text = page.run("document.getElementById('detail').innerText")
    assert "7 GiB of its host" in text
    type_filter(page, "")
    page.click("#scatter circle[data-plan='7']")
    assert "tensor_parallel_degree = 8" in page.run("document.getElementById('detail').innerText")
