"""The errors that titanlite raises; each message is one line that a user can act on."""

import bisect
import contextlib
import difflib
import linecache
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


class TitanliteError(Exception):
    """The base class of titanlite's errors."""

    rank: int | None = None
    """The rank that raised the error, if it comes from one."""
    is_printed_here: bool | None = None
    """Whether this rank prints the error; None until the ranks have agreed which one does."""


class ConfigError(TitanliteError):
    """A mistake in a file or on the command line: `section.key: what is wrong; what to do`.

    `problems` has one line per mistake; all mistakes of a job are reported together.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Append the lines of a ConfigError raised inside to `problems`, so that checks continue."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class NonFiniteError(TitanliteError):
    """A loss or gradient norm is not finite; names the step and the first such value."""


class RankError(TitanliteError):
    """A rank failed, died or timed out: its number, what happened, and its traceback."""

    def __init__(self, rank: int, message: str, rank_traceback: str = "") -> None:
        super().__init__(rank, message, rank_traceback)
        self.rank: int = rank
        self.message = message
        self.rank_traceback = rank_traceback

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class OutputClosedError(TitanliteError):
    """The reader of the output has closed it, as `head` does; nothing more can be printed."""


class OrderError(TitanliteError):
    """Ranks called different collectives, or in another order; names rank, axis and line."""


class LostWorldError(TitanliteError):
    """Communication between the ranks failed; the cause is reported elsewhere."""


def user_line(error: BaseException) -> str:
    """The innermost line of a traceback outside torch and titanlite: "net.py, line 5: x = f(x)".

    "" if there is none. The shipped models count as a user's code, and Python's import does not.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        is_model = package == "titanlite" and rest.startswith("models.") and rest.count(".") > 1
        if package not in ("titanlite", "torch", "importlib") or is_model:
            path = frame.f_code.co_filename
            text = linecache.getline(path, number).strip()
            place = f"{path.rpartition('/')[2]}, line {number}"
            return f"{place}: {text}" if text else place
    return ""


def nearest(value: int, legal: Sequence[int]) -> str:
    """The legal values nearest to `value`: "2 or 4". `legal` is ascending and not empty."""
    place = bisect.bisect_right(legal, value)
    return " or ".join(map(str, [*legal[max(0, place - 1) : place], *legal[place : place + 1]]))


def number_ranks(numbers: Collection[int]) -> str:
    """Rank numbers as text: "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def suggest(
    name: str, known: Iterable[str], otherwise: str = "", show: Callable[[str], str] = str
) -> str:
    """ "did you mean `known`?" for a known name that is spelled like `name`, or `otherwise`."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f"did you mean {show(match[0])}?" if match else otherwise


def one_of(words: Iterable[str]) -> str:
    """ "a", "a or b", "a, b or c"."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def quote(text: str) -> str:
    """`text` as a TOML string on one line."""
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
