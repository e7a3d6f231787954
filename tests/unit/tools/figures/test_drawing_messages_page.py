"""The page that steps through messages, in a browser."""

from collections.abc import Iterator

import browser
import pytest

from titanlite.tools.figures.messages import Arrow, Bar, MessagePicture, WorkBox, draw_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no chromium"),
]

PICTURE = MessagePicture(
    "Around & around",
    "three steps",
    ["rank 0", "rank 1", "rank 2"],
    3,
    [
        Arrow(0, 1, 0, "a, 8 B", "rank 0 to rank 1: a"),
        Arrow(1, 2, 1, "a+b, 8 B", "rank 1 to rank 2: a+b"),
        Arrow(2, 0, 1, "c, 8 B", "rank 2 to rank 0: c"),
    ],
    [WorkBox(1, 0, 2, "F0")],
    [Bar((0, 2), 2, "all_reduce, 8 B", "all_reduce 0: on ranks 0 and 2")],
    held=[
        [["a"], ["b"], ["c"]],
        [["a"], ["a+b"], ["c"]],
        [["a", "c"], ["a+b"], ["a+b+c"]],
        [["the end"], ["b"], [f"part {part}" for part in range(12)]],
    ],
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(draw_page(PICTURE), encoding="utf-8")
    with browser.open_page(path) as opened:
        yield opened


@pytest.fixture
def page(opened: browser.Page) -> Iterator[browser.Page]:
    opened.reload()
    yield opened
    assert opened.errors == []


def press(page: browser.Page, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def texts(page: browser.Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll('{selector}')].map(one => one.textContent)")


def cards(page: browser.Page) -> list[list[str]]:
    """The lines of each rank's card."""
    return page.run(
        "[...document.querySelectorAll('#stage .card')]"
        ".map(card => [...card.querySelectorAll('text')].map(one => one.textContent))"
    )


def test_arrow_keys_step_through_what_flies_and_what_is_held(page: browser.Page) -> None:
    assert texts(page, "h1") == ["Around & around"]
    assert texts(page, "#where") == ["time 0 of 3"]
    assert texts(page, "#stage .label") == ["a, 8 B"]
    assert cards(page) == [["rank 0", "a"], ["rank 1", "runs F0", "b"], ["rank 2", "c"]]
    press(page, "ArrowRight")
    assert texts(page, "#where") == ["time 1 of 3"]
    assert texts(page, "#stage .label") == ["a+b, 8 B", "c, 8 B"]
    assert texts(page, "#messages li") == ["rank 1 to rank 2: a+b", "rank 2 to rank 0: c"]
    assert cards(page)[1] == ["rank 1", "runs F0", "a+b"]
    press(page, "ArrowRight")
    assert cards(page)[0] == ["rank 0", "all_reduce, 8 B", "a", "c"]
    assert cards(page)[1] == ["rank 1", "a+b"]
    press(page, "ArrowLeft")
    assert texts(page, "#where") == ["time 1 of 3"]


def test_it_stops_at_both_ends_and_shortens_long_lists(page: browser.Page) -> None:
    press(page, "ArrowLeft")
    assert texts(page, "#where") == ["time 0 of 3"]
    press(page, "End")
    press(page, "ArrowRight")
    assert texts(page, "#where") == ["the end"]
    assert texts(page, "#stage .arrow") == []
    held = [f"part {part}" for part in range(4, 12)]
    assert cards(page)[2] == ["rank 2", "(4 earlier)", *held]
    press(page, "Home")
    assert page.run("document.getElementById('back').disabled")


def test_buttons_and_the_slider_step_too_and_the_cursor_follows(page: browser.Page) -> None:
    first = page.run("Number(document.getElementById('cursor').getAttribute('x'))")
    page.click("#on")
    second = page.run("Number(document.getElementById('cursor').getAttribute('x'))")
    assert second > first
    page.run(
        "(() => { const slider = document.getElementById('slider'); slider.value = 2;"
        "slider.dispatchEvent(new Event('input')); })()"
    )
    assert texts(page, "#where") == ["time 2 of 3"]
    # An arrow key on the slider is still one step.
    page.run("document.getElementById('slider').focus()")
    press(page, "ArrowRight")
    assert texts(page, "#where") == ["the end"]


@pytest.mark.parametrize("width", [420, 1280])
def test_everything_is_inside_the_window(page: browser.Page, width: int) -> None:
    page.size(width, 900)
    right = page.run(
        "Math.max(...[...document.querySelectorAll('#stage .card, #controls > *, #overview')]"
        ".map(one => one.getBoundingClientRect().right))"
    )
    assert right <= width
