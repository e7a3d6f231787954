"""Record: a recorded run that draws itself; docs/lab_pictures.py draws those of the notes.

In pictures of collectives, every value is tagged: element i of rank r is (i + 1) * 10^r, so the
digits of any sum tell which ranks' parts it is made of. The letter is the rank and the number is
the part: a0+b0 is the sum of part 0 of ranks 0 and 1.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from titanlite.tools.figures import messages
from titanlite.tools.lab.record import Message, Recorded, Steps, TensorInfo, TorchCall
from titanlite.tools.lab.steps import make_steps

if TYPE_CHECKING:
    import torch

LETTERS = "abcdefgh"
# A part of a tensor: its number, and the ranks whose parts are summed in it.
Part = tuple[int, frozenset[int]]


class Record(Recorded):
    """The events of a run; `steps` arranges them on a clock of equal steps, `svg` and `html` draw.

    `messages` are all messages in the order in which they were sent, `calls` all collectives.
    """

    @cached_property
    def steps(self) -> Steps:
        return make_steps(self)

    def svg(self, title: str = "", caption: str = "", rows: Sequence[str] = ()) -> str:
        """The picture of the run: messages as arrows between ranks (`rows`), over steps."""
        return messages.draw_svg(picture_of(self, title, caption, rows=rows))

    def html(self, title: str = "", caption: str = "", rows: Sequence[str] = ()) -> str:
        """A self-contained page that steps through the run with the arrow keys."""
        return messages.draw_page(picture_of(self, title, caption, rows=rows))

    def _repr_svg_(self) -> str:
        """The picture, which a notebook shows."""
        return self.svg()


def picture_of(
    record: Record,
    title: str = "",
    caption: str = "",
    *,
    rows: Sequence[str] = (),
    name: Callable[[Message], str] | None = None,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    held: Sequence[Sequence[Sequence[str]]] | None = None,
) -> messages.MessagePicture:
    """The messages, blocks of work and torch collectives of a run, on the clock of its steps.

    `rows` names the ranks, and `name` gives the text of a message. By default it is the label, else
    the values or the shape, and the bytes. `before` and `after` are texts for each rank. `held` is
    described in MessagePicture; by default, it is what each rank has received.
    """
    steps = record.steps
    texts = {id(each): (name or name_of)(each.message) for each in steps.flights}
    arrows = [
        messages.Arrow(
            each.message.source,
            each.message.target,
            each.start,
            texts[id(each)],
            _hover(each.message, texts[id(each)]),
        )
        for each in steps.flights
    ]
    bars = [_bar(each) for each in steps.calls]
    return messages.MessagePicture(
        title,
        caption,
        rows or [f"rank {rank}" for rank in range(record.num_ranks)],
        steps.length,
        arrows,
        [
            messages.WorkBox(each.rank, each.start, each.end, each.name)
            for each in steps.blocks
            if each.is_work
        ],
        bars,
        before,
        after,
        _received(steps.length, record.num_ranks, arrows, bars) if held is None else held,
    )


def name_of(message: Message) -> str:
    """The text of a message: what it is, and its bytes."""
    return f"{message.label or describe(message.tensor)}, {size(message.tensor.nbytes)}"


def _hover(message: Message, text: str) -> str:
    nbytes = size(message.tensor.nbytes)
    within = f" in {message.within}" if message.within else ""
    return (
        f"rank {message.source} to rank {message.target}: {text.removesuffix(f', {nbytes}')}"
        f"{within}; {message.tensor}, {nbytes}"
    )


def describe(tensor: TensorInfo) -> str:
    """The values of a tensor if there are at most four; its shape otherwise."""
    if tensor.values is not None and len(tensor.values) <= 4:
        return "[" + " ".join(f"{value:g}" for value in tensor.values) + "]"
    return "x".join(map(str, tensor.shape)) or "scalar"


def size(nbytes: int) -> str:
    """Bytes as text: "96 B", "1.5 KiB"."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes} B"


def _bar(each: TorchCall) -> messages.Bar:
    call = each.call
    event = call.events[call.ranks[0]]
    name = call.names[call.ranks[0]]
    if not event.tensor.dtype:
        return messages.Bar(call.ranks, each.start, event.name, name)
    what = f" {event.label}" if event.label else ""
    hover = f"{name}{what}: {event.tensor} on each rank"
    return messages.Bar(
        call.ranks, each.start, f"{event.name}{what}, {size(event.tensor.nbytes)}", hover
    )


def _received(
    length: int, num_ranks: int, arrows: Sequence[messages.Arrow], bars: Sequence[messages.Bar]
) -> list[list[list[str]]]:
    """What each rank has received by each step, in messages and in collectives of torch."""
    arrivals = [(arrow.start, arrow.target, arrow.text) for arrow in arrows]
    arrivals += [(bar.start, rank, bar.text) for bar in bars for rank in bar.rows]
    arrivals.sort()
    held = []
    for step in range(length + 1):
        by_rank: list[dict[str, None]] = [{} for _ in range(num_ranks)]
        for start, rank, text in arrivals:
            if start < step:
                by_rank[rank][text] = None
        held.append([list(texts) for texts in by_rank])
    return held


def tagged(rank: int, num_parts: int) -> "torch.Tensor":
    """The tensor of a rank in which element i, its part i, is (i + 1) * 10^rank (int64)."""
    import torch

    return torch.arange(1, num_parts + 1) * 10**rank


def parts_of(values: Sequence[float]) -> list[Part]:
    """The parts of which tagged values are made. Raises ValueError for other values."""
    parts = []
    for value in values:
        digits = [int(digit) for digit in reversed(str(int(value)))]
        ranks = frozenset(rank for rank, digit in enumerate(digits) if digit)
        numbers = {digit for digit in digits if digit}
        if len(numbers) != 1:
            raise ValueError(f"{value} is not a sum of one part of several ranks")
        parts.append((numbers.pop() - 1, ranks))
    return parts


def name_parts(parts: Sequence[Part], num_parts: int) -> str:
    """The text of parts: "a2+b2", or "a" for all `num_parts` parts of a rank (0: never)."""
    texts: list[str] = []
    place = 0
    while place < len(parts):
        number, ranks = parts[place]
        run = [(n, ranks) for n in range(num_parts)]
        letters = sorted(LETTERS[rank] for rank in ranks)
        if run and list(parts[place : place + num_parts]) == run:
            texts.append("+".join(letters))
            place += num_parts
        else:
            texts.append("+".join(f"{letter}{number}" for letter in letters))
            place += 1
    return " ".join(texts)
