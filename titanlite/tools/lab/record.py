"""Recorded: who sent what to whom in a run, when, and for which collective. Needs no torch.

Every device writes its communication events into a log (recorder.py). The host reads the logs while
the run goes on, to see mistakes and deadlocks (diagnosis.py), and afterwards, to draw the run
(steps.py computes the step of each message, pictures.py the picture).
"""

import itertools
import pickle
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

# The kinds of events. A device posts a SEND, RECEIVE or COLLECTIVE (of torch.distributed), and may
# WAIT for it and then RESUME. BEGIN and END enclose a collective of the virtual device, ENTER and
# LEAVE a block of `torch.profiler.record_function`. RETURN ends the run.
SEND, RECEIVE, COLLECTIVE, WAIT, RESUME = "send", "receive", "collective", "wait", "resume"
BEGIN, END, ENTER, LEAVE, RETURN = "begin", "end", "enter", "leave", "return"


class TensorInfo(NamedTuple):
    """The dtype, shape and bytes of a tensor, and its values if they were recorded and are few."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    values: tuple[float, ...] | None = None

    @classmethod
    def of(cls, tensor: Any, values: tuple[float, ...] | None = None) -> "TensorInfo":
        return cls(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes, values
        )

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


# That of a barrier.
NO_TENSOR = TensorInfo("", (), 0)


class Event(NamedTuple):
    """What one device did. `seconds` counts from the start of the run.

    `number` identifies a post or a block on its device; WAIT, RESUME, END and LEAVE have the number
    of what they belong to. `name` is the kind of a collective or the name of a block, `label` the
    name of its tensor, by default that of the innermost block. `peers` is the peer of a message, or
    the ranks of a collective in group order. `channel` names the process group and the tag of
    torch.distributed, if they are not the default. `where` is the line of the caller outside
    titanlite and torch, as "file:line".
    `thread` is 0 for the thread that runs the job, and counts the others.
    """

    rank: int
    seconds: float
    kind: str
    number: int
    name: str = ""
    label: str = ""
    peers: tuple[int, ...] = ()
    channel: str = ""
    tensor: TensorInfo = NO_TENSOR
    where: str = ""
    thread: int = 0


@dataclass
class Message:
    """A tensor sent from one device to another; one of `sent` and `received` may be missing.

    `within` is the collective that sent it, such as "all_reduce 3" (collectives of one kind are
    numbered from 0 on each device), or "". `into` is the same on the receiving device. `label` is
    the label of the collective, by default the name of the innermost block.
    """

    source: int
    target: int
    sent: Event | None = None
    received: Event | None = None
    within: str = ""
    into: str = ""
    label: str = ""

    @property
    def tensor(self) -> TensorInfo:
        """The tensor that was sent (that is to be received, if nothing was sent)."""
        event = self.sent or self.received
        assert event is not None
        return event.tensor


@dataclass
class Call:
    """A collective that devices of a group have called: the event of each, by rank.

    `is_torch` distinguishes the collectives of torch.distributed from those of the virtual device.
    `names` has the name on each rank, such as "all_reduce 3".
    """

    ranks: tuple[int, ...]
    is_torch: bool
    events: dict[int, Event] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.events) == len(self.ranks)


@dataclass(frozen=True)
class Flight:
    """A message that flies from the step `start` to `start` + 1."""

    message: Message
    start: int


@dataclass(frozen=True)
class Block:
    """A named block on one rank, from `start` to `end`; `is_work` if it only computes."""

    rank: int
    name: str
    start: int
    end: int
    is_work: bool


@dataclass(frozen=True)
class TorchCall:
    """A collective of torch.distributed from `start` to `start` + 1."""

    call: Call
    start: int


@dataclass
class Steps:
    """A run by steps: messages, blocks, collectives, and the number of steps."""

    flights: list[Flight] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    calls: list[TorchCall] = field(default_factory=list)
    length: int = 0


class Recorded:
    """The events of a run, by rank and in order, and what follows from them.

    `messages` are all messages in the order in which they were sent, `calls` all collectives.
    """

    def __init__(self, events: Sequence[Sequence[Event]]) -> None:
        self.events = [list(of_rank) for of_rank in events]

    @property
    def num_ranks(self) -> int:
        return len(self.events)

    @cached_property
    def messages(self) -> list[Message]:
        return sorted(
            self._matched[0],
            key=lambda message: (message.sent or message.received).seconds,  # type: ignore[union-attr]
        )

    @cached_property
    def calls(self) -> list[Call]:
        """Every collective: the k-th call of each device of a group makes the k-th collective."""
        found: dict[tuple[bool, tuple[int, ...], str, int], Call] = {}
        for rank, of_rank in enumerate(self.events):
            counted: Counter[tuple[bool, tuple[int, ...], str]] = Counter()
            for event in of_rank:
                is_torch = event.kind == COLLECTIVE
                if not event.peers or not (is_torch or event.kind == BEGIN):
                    continue
                key = (is_torch, event.peers, event.channel)
                call = found.setdefault((*key, counted[key]), Call(event.peers, is_torch))
                counted[key] += 1
                call.events[rank] = event
                call.names[rank] = self.names[rank, event.number]
        return list(found.values())

    @cached_property
    def names(self) -> dict[tuple[int, int], str]:
        """The numbered name of each collective, by rank and the number of its event."""
        names = {}
        for rank, of_rank in enumerate(self.events):
            counted: Counter[str] = Counter()
            for event in of_rank:
                if event.kind in (COLLECTIVE, BEGIN):
                    names[rank, event.number] = f"{event.name} {counted[event.name]}"
                    counted[event.name] += 1
        return names

    def message_of(self, event: Event) -> Message:
        """The message of a SEND or RECEIVE event."""
        return self._matched[1][event.rank, event.number]

    def call_of(self, event: Event) -> Call:
        """The collective of a COLLECTIVE or BEGIN event."""
        return self._call_of[event.rank, event.number]

    @cached_property
    def _call_of(self) -> dict[tuple[int, int], Call]:
        return {
            (rank, event.number): call for call in self.calls for rank, event in call.events.items()
        }

    @cached_property
    def _matched(self) -> tuple[list[Message], dict[tuple[int, int], Message]]:
        """Messages between two devices keep their order: the k-th receive takes the k-th send."""
        sent: defaultdict[tuple[int, int, str], list[Message]] = defaultdict(list)
        received: defaultdict[tuple[int, int, str], list[Message]] = defaultdict(list)
        for rank, of_rank in enumerate(self.events):
            inside_by_thread: defaultdict[int, list[Event]] = defaultdict(list)
            for event in of_rank:
                inside = inside_by_thread[event.thread]
                if event.kind == BEGIN:
                    inside.append(event)
                elif event.kind == END:
                    inside.pop()
                elif event.kind in (SEND, RECEIVE):
                    (peer,) = event.peers
                    within = self.names[rank, inside[-1].number] if inside else ""
                    if event.kind == SEND:
                        label = (inside[-1].label if inside else "") or event.label
                        message = Message(rank, peer, sent=event, within=within, label=label)
                        sent[rank, peer, event.channel].append(message)
                    else:
                        message = Message(peer, rank, received=event, into=within)
                        received[peer, rank, event.channel].append(message)
        messages: list[Message] = []
        by_event: dict[tuple[int, int], Message] = {}
        for key in {**sent, **received}:
            pairs = itertools.zip_longest(sent.get(key, ()), received.get(key, ()))
            for start, end in pairs:
                message = start or end
                if start and end:
                    message.received, message.into = end.received, end.into
                messages.append(message)
                for side in (message.sent, message.received):
                    if side is not None:
                        by_event[side.rank, side.number] = message
        return messages, by_event


class Logs:
    """The logs of all devices in a folder: one file per rank, a length and a pickle per event."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.paths = [log_path(folder, rank) for rank in range(num_ranks)]

    def clear(self) -> None:
        for path in self.paths:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")

    def sizes(self) -> list[int]:
        """The bytes of each log; if they stay the same, no device communicates."""
        return [path.stat().st_size for path in self.paths]

    def read(self) -> list[list[Event]]:
        return [_read(path) for path in self.paths]


def log_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / str(rank)


def packed(event: Event) -> bytes:
    """The bytes of an event in a log."""
    text = pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
    return len(text).to_bytes(4, "little") + text


def _read(path: Path) -> list[Event]:
    data = path.read_bytes()
    events, place = [], 0
    # The last event may be half written.
    while (start := place + 4) <= len(data):
        place = start + int.from_bytes(data[start - 4 : start], "little")
        if place <= len(data):
            events.append(pickle.loads(data[start:place]))
    return events
