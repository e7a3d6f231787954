"""What a person sees: the progress bar and the first screen, in a pseudo-terminal and in a pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable
from typing import TextIO

import pytest

from titanlite.observe.first_screen import Fact, render_screen
from titanlite.observe.metrics import StepRecord
from titanlite.observe.progress import Progress
from titanlite.observe.terminal import tell, telling
from titanlite.plan_row import PlanRow
from titanlite.quantities import format_bytes, format_count, format_duration
from titanlite.tools.tables import format_table

ROWS = [
    PlanRow("tensor parallel", "degree 2", "degree 2", "9 modules in 4 blocks"),
    PlanRow("CPU offload", "pinned", "unpinned", "pinning needs CUDA"),
]


def make_record(step: int, **changes: float) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5 / step,
        grad_norm=0.5,
        lr=1e-3,
        tokens_per_second=12345.0,
        seconds=0.5,
        memory_bytes=512 * 2**20,
        **changes,  # type: ignore[arg-type]
    )


def ticking() -> Callable[[], float]:
    """A clock that moves on by half a second each time it is read."""
    times = iter(range(10**6))
    return lambda: next(times) / 2


def see_on_terminal(show: Callable[[TextIO], None], columns: int = 90) -> str:
    """All that `show` writes to a terminal, as raw characters."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # how Linux says that the last writer has closed
                return
            if not chunk:
                return
            seen.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(follower, "w", encoding="utf-8") as stream:
            show(stream)
    finally:
        reader.join()
        os.close(leader)
    return b"".join(seen).decode()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def final_screen(raw: str) -> list[str]:
    """The lines left on the screen, for the few control sequences that the bar uses."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif token.startswith("\x1b["):
            kind, count = token[-1], token[2:-1]
            if kind == "A":
                row -= int(count or 1)
            elif kind == "K":
                assert count == "2"
                lines[row] = ""
            else:
                assert kind in "mhl", token
        else:
            lines[row] = (
                lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            )
            column += len(token)
    return [line.rstrip() for line in lines]


def run_steps(stream: TextIO, color: bool = True, fail: BaseException | None = None) -> None:
    with Progress(20, stream=stream, color=color, log_freq=5, clock=ticking()) as progress:
        for step in range(1, 21):
            if step == 12 and fail is not None:
                raise fail
            measures = {"perplexity": 4.482, "bits_per_dim": 2.164}
            extra = {"validation_loss": 1.5, "measures": measures} if step == 8 else {}
            progress.update(make_record(step, flops_per_second=3.4e12, mfu=0.41, **extra))
            if step == 9:
                progress.print("a word in between")


def test_a_pipe_gets_plain_lines() -> None:
    out = io.StringIO()
    run_steps(out)
    lines = out.getvalue().splitlines()
    steps = [line.split("/")[0] for line in lines if "/20" in line]
    assert steps == ["step  1", "step  5", "step 10", "step 15", "step 20"]
    assert lines[1] == (
        "step  5/20  loss 0.5000  norm 0.5  12.3k tokens/s  MFU 41.0%  512 MiB/rank  0:00:08 left"
    )
    assert lines[2] == "step 8: validation loss 1.5000  perplexity 4.482  2.164 bits/dim"
    assert lines[3] == "a word in between"
    assert lines[-1].endswith(" in all")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())
    assert out.getvalue().isascii()


def test_a_terminal_gets_one_bar_that_ends_clean() -> None:
    raw = see_on_terminal(run_steps)
    screen = final_screen(raw)
    assert screen[:2] == [
        "step 8: validation loss 1.5000  perplexity 4.482  2.164 bits/dim",
        "a word in between",
    ]
    assert re.fullmatch(r"step 20/20 \u2501+ 0:00:\d\d in all", screen[2])
    assert screen[3].startswith("loss 0.1250  norm 0.5  lr 1.00e-03  12.3k tokens/s")
    assert screen[3].endswith("512 MiB/rank")
    assert screen[4:] == [""]
    assert cursor_is_shown(raw)


def cursor_is_shown(raw: str) -> bool:
    return raw.rfind("\x1b[?25h") > raw.rfind("\x1b[?25l")


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_the_terminal_is_clean_after_an_error_and_ctrl_c(error: BaseException) -> None:
    def show(stream: TextIO) -> None:
        with pytest.raises(type(error)):
            run_steps(stream, fail=error)
        stream.write("the shell again")

    raw = see_on_terminal(show)
    screen = final_screen(raw)
    assert screen[2].startswith("step 11/20 ")
    assert screen[-1] == "the shell again"
    assert cursor_is_shown(raw)
    # No mode, such as the alternate screen or a hidden cursor, is left on.
    assert set(re.findall(r"\x1b\[\?(\d+)h", raw)) == {"25"}


def test_the_cursor_is_shown_during_the_run() -> None:
    # A rank that is killed has no time to bring it back.
    def show(stream: TextIO) -> None:
        with Progress(20, stream=stream, clock=ticking()) as progress:
            progress.update(make_record(1))
            stream.write("<killed here>")

    before, _ = see_on_terminal(show).split("<killed here>")
    assert cursor_is_shown(before)


def test_without_color_a_terminal_gets_no_color() -> None:
    colored, plain = (see_on_terminal(lambda s, c=c: run_steps(s, color=c)) for c in (True, False))
    assert re.search(r"\x1b\[[0-9;]+m", colored)
    assert not re.search(r"\x1b\[[0-9;]*m", plain)
    assert final_screen(plain) == final_screen(colored)


def test_no_line_is_wider_than_a_narrow_terminal() -> None:
    screen = final_screen(see_on_terminal(run_steps, columns=40))
    assert max(map(len, screen[2:])) <= 40
    assert "512 MiB/rank" in "\n".join(screen)


def test_columns_that_do_not_fit_follow_beside_the_first() -> None:
    table = format_table(["a", "bb", "cc"], [["1", "2", "3"]], left=["cc"], width=6)
    assert table == "a  bb\n-  --\n1   2\n\na  cc\n-  --\n1  3"


def test_what_takes_long_shows_a_clock_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()

    def show(stream: TextIO) -> None:
        monkeypatch.setattr("sys.stderr", stream)
        with telling("tracing a step"):
            assert ticked.wait(60)

    monkeypatch.setattr("titanlite.observe.terminal.SILENT_SECONDS", 0.05)
    told = lambda *words: (tell(*words), ticked.set())
    monkeypatch.setattr("titanlite.observe.terminal.tell", told)
    raw = see_on_terminal(show, columns=20)
    assert re.search(r"\d s  tracing a st\r", raw)
    assert final_screen(raw) == [""]


def test_through_a_pipe_it_is_said_once_and_to_a_notebook_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticked, (own, stand_in) = threading.Event(), (io.StringIO(), io.StringIO())
    monkeypatch.setattr("sys.__stderr__", own)
    monkeypatch.setattr("titanlite.observe.terminal.SILENT_SECONDS", 0.0)
    told = lambda *words: (tell(*words), words[0] and ticked.set())
    monkeypatch.setattr("titanlite.observe.terminal.tell", told)
    for stream in (own, stand_in):
        ticked.clear()
        monkeypatch.setattr("sys.stderr", stream)
        with telling("tracing a step"):
            assert ticked.wait(60)
    assert (own.getvalue(), stand_in.getvalue()) == ("tracing a step ...\n", "")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in see_on_terminal(run_steps)


def test_other_ranks_show_nothing() -> None:
    out = io.StringIO()
    with Progress(3, enabled=False, stream=out) as progress:
        progress.update(make_record(1))
        progress.print("not this either")
    assert out.getvalue() == ""


def test_a_resumed_run_goes_on_from_its_step() -> None:
    out = io.StringIO()
    with Progress(110, first_step=101, stream=out, clock=ticking()) as progress:
        for step in range(101, 111):
            progress.update(make_record(step))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 101/110",
        "step 110/110",
    ]


def test_a_slow_run_does_not_wait_for_log_freq() -> None:
    ends = iter([0.0, 0.0, 5.0, 15.0, 25.0, 35.0, 45.0, 66.0])
    out = io.StringIO()
    with Progress(100, stream=out, log_freq=50, clock=lambda: next(ends)) as progress:
        for step in range(1, 7):
            progress.update(make_record(step))
            if step == 1:
                # The first figures are there as soon as the first step is.
                assert out.getvalue().startswith("step   1/100  loss 2.5000")
    shown = [line.split("/")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step   1", "step   4", "step   6"]


def test_time_left_leaves_the_slow_first_step_out() -> None:
    times = iter([0.0, 0.0, 100.0, 101.0, 102.0])
    out = io.StringIO()
    with Progress(11, stream=out, log_freq=1, clock=lambda: next(times)) as progress:
        for step in range(1, 4):
            progress.update(make_record(step))
    first, second, third = out.getvalue().splitlines()
    assert not first.endswith("left")
    assert second.endswith("0:00:09 left")
    assert third.endswith("0:00:08 left")


def first_screen(stream: TextIO | None = None, color: bool = True) -> str:
    facts = [Fact("device", "cpu"), Fact("batch", "8; it depends on the plan", differs=True)]
    return render_screen("a job", facts, ROWS, "mesh: 1 rank", stream=stream, color=color)


def test_the_first_screen_is_plain_text_in_a_file() -> None:
    assert first_screen(io.StringIO()) == first_screen()
    assert "\x1b" not in first_screen()


def test_the_first_screen_is_as_wide_as_the_terminal_and_marks_what_differs() -> None:
    def show(color: bool) -> Callable[[TextIO], None]:
        return lambda stream: print(first_screen(stream, color), file=stream)

    raw = see_on_terminal(show(True), columns=50)
    screen = final_screen(raw)
    assert "! batch   8; it depends on the plan" in screen
    assert any("! CPU offload" in line for line in screen)
    assert max(map(len, screen)) <= 50
    assert "\x1b[1;33m" in raw
    assert "\x1b[33" not in see_on_terminal(show(False), columns=50)
    # The same words as in a file, broken elsewhere.
    assert " ".join(screen).split() == first_screen().split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(0), "0"),
        (format_count(7), "7"),
        (format_count(12345), "12.3k"),
        (format_count(999.6), "1.00k"),
        (format_count(0.25), "0.25"),
        (format_count(3.4e12, spaced=True), "3.40 T"),
        (format_count(float("nan")), "nan"),
        (format_bytes(0), "0 B"),
        (format_bytes(512 * 2**20), "512 MiB"),
        (format_bytes(1.5 * 2**30), "1.50 GiB"),
        (format_bytes(1023.9 * 2**20), "1.00 GiB"),
        (format_bytes(141 * 2**30), "141 GiB"),
        (format_duration(59.6), "0:01:00"),
        (format_duration(3 * 86400 + 3661), "3d 1:01:01"),
    ],
)
def test_quantities_have_three_figures(text: str, expected: str) -> None:
    assert text == expected
