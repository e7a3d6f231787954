"""A run's progress: a live bar on a terminal, plain lines elsewhere.

Both show step, loss, gradient norm, learning rate, tokens/s, FLOP/s, MFU on a known GPU, memory per
rank and time left. Only one rank shows it; the others pass enabled=False.
"""

import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titanlite.errors import OutputClosedError
from titanlite.observe.metrics import StepRecord
from titanlite.observe.terminal import is_terminal, terminal_width
from titanlite.quantities import format_bytes, format_count, format_duration

_REDRAW_SECONDS = 0.1
# Outside a terminal, a slow run prints a line at the next step after this time.
_LONGEST_SILENCE_SECONDS = 30.0
# The weight of a new step in the running mean of seconds per step.
_NEW_WEIGHT = 0.1
# The most columns of a line outside a terminal.
_MOST_COLUMNS = 100
_NUMBER = r"(?<!\S)-?\d\S*"


class Progress:
    """Shows the steps of a run as they end: `with Progress(steps) as p: ... p.update(record)`.

    On a terminal the bar stays at the bottom and `print` writes above it. Elsewhere a line without
    control characters is written for the first step, the last, every `log_freq`-th, and any step
    that ends half a minute after the previous line. It has no FLOP/s, and fits 100 columns, if need
    be without the learning rate. A validation has its own line. With `color` False there are no
    colors on a terminal either. However the block ends, Ctrl-C included, the bar keeps its last
    state and the terminal is restored. A resumed run passes its `first_step`.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        enabled: bool = True,
        stream: TextIO | None = None,
        color: bool = True,
        log_freq: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._first_step = total_steps, first_step
        self._stream = sys.stdout if stream is None else stream
        self._log_freq = log_freq
        self._clock = clock
        self._enabled = enabled
        self._last: StepRecord | None = None
        self._of_whom = "/rank"
        self._start_time = self._last_time = clock()
        self._seconds_per_step = 0.0
        self._num_timed = 0
        self._drawn_at = float("-inf")
        self._live: Live | None = None
        if enabled and is_terminal(self._stream):
            console = Console(
                file=self._stream,
                force_terminal=True,
                color_system="auto" if color else None,
                width=terminal_width(self._stream),
            )
            # No thread redraws, because the process may fork or compile.
            self._live = Live(
                get_renderable=self._screen, console=console, auto_refresh=False, transient=False
            )

    def __enter__(self) -> "Progress":
        self._start_time = self._last_time = self._clock()
        if self._live is not None:
            self._live.start(refresh=True)
            # Keep the cursor visible: a killed rank could not show it again.
            self._live.console.show_cursor(True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, record: StepRecord, *, of_all_ranks: bool = False) -> None:
        """Show a finished step; `of_all_ranks`: its memory is that of all of them together."""
        if not self._enabled:
            return
        now = self._clock()
        self._count_time(now)
        self._last, self._of_whom = record, " in all" if of_all_ranks else "/rank"
        is_last = record.step >= self._total_steps
        if self._live is not None:
            self._print_validation(record)
            if is_last or now - self._drawn_at >= _REDRAW_SECONDS:
                self._drawn_at = now
                self._live.console.width = terminal_width(self._stream)
                self._live.refresh()
        elif (
            is_last
            or record.step == self._first_step
            or record.step % self._log_freq == 0
            or now - self._drawn_at >= _LONGEST_SILENCE_SECONDS
        ):
            self._drawn_at = now
            parts = [self._count(), *_figures(record, self._of_whom), self._time_left()]
            line = "  ".join(part for part in parts if part and "FLOP/s" not in part)
            self.print(line if len(line) <= _MOST_COLUMNS else re.sub(r"  lr \S+", "", line))
        if self._live is None:
            self._print_validation(record)

    def print(self, line: str) -> None:
        """Write a line; on a terminal, above the bar."""
        if not self._enabled:
            return
        if self._live is not None:
            self._live.console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError as error:
                raise OutputClosedError("the output is closed, so the run ends") from error

    def _print_validation(self, record: StepRecord) -> None:
        if figures := _validation(record):
            self.print(f"step {record.step}: {'  '.join(figures)}")

    def _count_time(self, now: float) -> None:
        elapsed, self._last_time = now - self._last_time, now
        self._num_timed += 1
        if self._num_timed <= 2:
            # The first step includes setup and compilation, so it does not count in the mean.
            self._seconds_per_step = elapsed
        else:
            self._seconds_per_step += _NEW_WEIGHT * (elapsed - self._seconds_per_step)

    def _step(self) -> int:
        return self._first_step - 1 if self._last is None else self._last.step

    def _count(self) -> str:
        return f"step {self._step():>{len(str(self._total_steps))}}/{self._total_steps}"

    def _time_left(self) -> str:
        if self._step() >= self._total_steps:
            return f"{format_duration(self._last_time - self._start_time)} in all"
        if self._num_timed < 2:
            return ""
        seconds = (self._total_steps - self._step()) * self._seconds_per_step
        return f"{format_duration(seconds)} left"

    def _screen(self) -> Group:
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(
            Text(self._count(), style="bold"),
            ProgressBar(
                total=max(self._total_steps, 1),
                completed=self._step(),
                complete_style="blue",
                finished_style="green",
            ),
            Text(self._time_left(), style="cyan"),
        )
        last = self._last
        figures = _figures(last, self._of_whom) if last else ["waiting for the first step"]
        width = 0 if self._live is None else self._live.console.width
        lines = [Text(line, no_wrap=True) for line in _packed(figures, width)]
        for line in lines:
            line.highlight_regex(_NUMBER, "bold")
        return Group(bar, *lines)


def _packed(parts: list[str], width: int) -> list[str]:
    """The parts joined into lines of at most `width` columns; no part is split."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _figures(record: StepRecord, of_whom: str) -> list[str]:
    figures = [f"loss {record.loss:.4f}", f"norm {record.grad_norm:.3g}", f"lr {record.lr:.2e}"]
    if record.tokens_per_second is not None:
        figures.append(f"{format_count(record.tokens_per_second)} tokens/s")
    if record.samples_per_second is not None:
        figures.append(f"{format_count(record.samples_per_second)} samples/s")
    if record.flops_per_second is not None:
        figures.append(f"{format_count(record.flops_per_second, spaced=True)}FLOP/s")
    if record.mfu is not None:
        figures.append(f"MFU {record.mfu:.1%}")
    figures.append(f"{format_bytes(record.memory_bytes)}{of_whom}")
    return figures


def _validation(record: StepRecord) -> list[str]:
    if record.validation_loss is None:
        return []
    figures = [f"validation loss {record.validation_loss:.4f}"]
    for name, value in record.measures.items():
        what, _, unit = name.partition("_per_")
        figures.append(f"{value:.3f} {what}/{unit}" if unit else f"{name} {value:.3f}")
    return figures + [f"{name} {value:.4f}" for name, value in record.validation_metrics.items()]
