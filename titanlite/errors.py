"""The errors titanlite raises on purpose: each message is one line a user can act on."""

import bisect
import contextlib
from collections.abc import Collection, Iterator, Sequence


class TitanliteError(Exception):
    """Root of every error titanlite raises on purpose."""

    is_told_here: bool | None = None
    """Whether this rank is the one to print it; None where the ranks have not settled that."""


class ConfigError(TitanliteError):
    """A mistake in a file or on the command line: `section.key: what is wrong; what to do`.

    `problems` holds one such line each; all problems of one job are reported together.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """What a ConfigError inside says joins `problems`, so that others can be looked for."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class NonFiniteError(TitanliteError):
    """A loss or gradient norm is not finite: the step, and where it began."""


class RankError(TitanliteError):
    """A rank failed, died or did not finish: its number, what happened, and its traceback."""

    def __init__(self, rank: int, message: str, rank_traceback: str = "") -> None:
        super().__init__(rank, message, rank_traceback)
        self.rank = rank
        self.message = message
        self.rank_traceback = rank_traceback

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class OutputClosedError(TitanliteError):
    """What reads the output has closed it, as `head` does: nothing more can be shown."""


class OrderError(TitanliteError):
    """Ranks called unlike collectives, or in another order: which rank, where, over which axis."""


class LostWorldError(TitanliteError):
    """The ranks of a world have lost each other; what happened is reported elsewhere."""


def nearest(value: int, legal: Sequence[int]) -> str:
    """The legal values next to `value`, such as "2 or 4"; `legal` is ascending and not empty."""
    place = bisect.bisect_right(legal, value)
    return " or ".join(map(str, [*legal[max(0, place - 1) : place], *legal[place : place + 1]]))


def number_ranks(numbers: Collection[int]) -> str:
    """Ranks in words, such as "rank 3" or "ranks 0, 2"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
