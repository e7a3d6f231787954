"""Mistakes of a run, read from its record: what was called, sent and awaited on both sides.

A deadlock needs no timeout to be seen. A device that waits can go on only when a certain peer posts
something. If every one of those peers has ended or waits in the same way, none ever will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titanlite.errors import RankError
from titanlite.tools.lab.record import (
    COLLECTIVE,
    RECEIVE,
    RETURN,
    SEND,
    WAIT,
    Call,
    Event,
    Message,
    Recorded,
    TensorInfo,
)

# What CommunicationError.kind may be.
COLLECTIVES, SIZE, DTYPE, DEADLOCK, UNRECEIVED = (
    "collectives",
    "size",
    "dtype",
    "deadlock",
    "unreceived",
)
# The collectives of torch.distributed whose tensors have the same shape on all ranks.
EQUAL_SHAPES = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"}


class CommunicationError(RankError):
    """Devices do not agree on what they send, receive or call together; all of them were ended.

    `kind` is one of COLLECTIVES (unequal collectives), SIZE and DTYPE (of a message), DEADLOCK and
    UNRECEIVED. `record` is the record of the run.
    """

    def __init__(self, rank: int, message: str, kind: str, record: Recorded) -> None:
        super().__init__(rank, message)
        self.kind = kind
        self.record = record

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.message, self.kind, self.record)


def check_agreement(record: Recorded, *, is_running: bool = False) -> None:
    """Raise CommunicationError if both sides of a collective or a message differ.

    While the run goes on, only collectives are compared that all of their ranks have called, so
    that the rank that differs from the others is named.
    """
    unequal = _unequal_messages(record)
    message = min(unequal, key=lambda one: (one.target, one.source), default=None)
    for call in record.calls:
        difference = _difference(call) if call.is_complete or not is_running else None
        if difference is not None:
            rank, text = difference
            if message is not None:
                text += f"; rank {message.target} {_size_mistake(message)}"
            raise CommunicationError(rank, text, COLLECTIVES, record)
    if message is not None:
        kind = SIZE if message.sent.tensor.nbytes != message.received.tensor.nbytes else DTYPE  # type: ignore[union-attr]
        raise CommunicationError(message.target, _size_mistake(message), kind, record)


def check_received(record: Recorded) -> None:
    """Raise CommunicationError if a message of a run that has ended was sent or awaited in vain."""
    for message in record.messages:
        if message.received is None and message.sent is not None:
            pair = message.source, message.target
            sent, received = _traffic(record, *pair)
            raise CommunicationError(
                message.source,
                f"sent {sent} {_messages(sent)} to rank {message.target}, which received "
                f"{received}: nothing receives {_content(message.sent)}{_inside(message.within)}"
                f"{_at(message.sent)}; every send needs a matching receive",
                UNRECEIVED,
                record,
            )
        if message.sent is None and message.received is not None:
            sent, received = _traffic(record, message.source, message.target)
            raise CommunicationError(
                message.target,
                f"started {received} {'receive' if received == 1 else 'receives'} from rank "
                f"{message.source}, which sent {sent} {_messages(sent)}: nothing was sent for the "
                f"receive{_inside(message.into)}{_at(message.received)}; every receive needs a "
                "matching send",
                UNRECEIVED,
                record,
            )


def check_deadlock(record: Recorded) -> None:
    """Raise CommunicationError if devices wait for each other and none can go on.

    `record` must be of one moment: no device wrote anything while it was read.
    """
    waits: dict[int, tuple[Event, tuple[int, ...]]] = {}
    ended: set[int] = set()
    for rank, of_rank in enumerate(record.events):
        if of_rank and of_rank[-1].kind == RETURN:
            ended.add(rank)
        elif any(event.thread for event in of_rank):
            # Its threads may wait for each other, which is not recorded.
            continue
        elif of_rank and of_rank[-1].kind == WAIT:
            awaited = next(
                event
                for event in reversed(of_rank)
                if event.number == of_rank[-1].number and event.kind in (SEND, RECEIVE, COLLECTIVE)
            )
            missing = _missing(record, awaited)
            if missing:
                waits[rank] = awaited, missing
                # Ranks of a process group that is larger than the mesh of this run.
                ended.update(one for one in missing if one >= record.num_ranks)
    # The largest set of waiting ranks that wait only for ranks that have ended or are in it.
    while free := [
        rank for rank, (_, missing) in waits.items() if not ended.union(waits) & set(missing)
    ]:
        for rank in free:
            del waits[rank]
    if not waits:
        return
    chain = [min(waits)]
    while True:
        _, missing = waits[chain[-1]]
        gone = sorted(ended & set(missing))
        following = gone[0] if gone else next(rank for rank in missing if rank in waits)
        if gone or following in chain:
            break
        chain.append(following)
    if not gone:
        chain = chain[chain.index(following) :]
        first = chain.index(min(chain))
        chain = chain[first:] + chain[:first]
    raise CommunicationError(chain[0], _deadlock(record, waits, chain, gone), DEADLOCK, record)


def _deadlock(
    record: Recorded,
    waits: dict[int, tuple[Event, tuple[int, ...]]],
    chain: list[int],
    gone: list[int],
) -> str:
    links = [_wait(record, *waits[rank]) for rank in chain]
    if gone:
        text = ", which ".join(links[:4]) + ", and so on" * (len(links) > 4)
        end = "has ended" if gone[0] < record.num_ranks else "is not on the mesh of this run"
        is_only_one = len(waits[chain[-1]][1]) == 1
        return f"{text}, which {end}" if is_only_one else f"{text}; rank {gone[0]} {end}"
    cycle = " -> ".join(map(str, [*chain, chain[0]]))
    links_listed = "; ".join(
        f"rank {rank} {link}" for rank, link in zip(chain[:2], links[:2], strict=True)
    )
    advice = ""
    kinds = {waits[rank][0].kind for rank in chain}
    if kinds == {SEND}:
        advice = "; send with isend, receive, and wait for the sends after that"
    elif kinds == {RECEIVE}:
        advice = "; one of them must send before it receives"
    return (
        f"is in a deadlock, {cycle}: each rank waits for the next, and nothing is in flight; "
        f"{links_listed}{'; and so on' * (len(links) > 2)}{advice}"
    )


def _wait(record: Recorded, awaited: Event, missing: tuple[int, ...]) -> str:
    """What a rank waits for; ends with the rank that it waits for."""
    if awaited.kind == COLLECTIVE:
        name = record.names[awaited.rank, awaited.number]
        return f"waits in {name}{_at(awaited)} for {_ranks(missing)}"
    message = record.message_of(awaited)
    if awaited.kind == SEND:
        place = f"{_inside(message.within)}{_at(awaited)}"
        return f"waits{place} until its {_content(awaited)} are received by rank {message.target}"
    place = f"{_inside(message.into)}{_at(awaited)}"
    return f"waits{place} for {_bytes(awaited)} from rank {message.source}"


def _missing(record: Recorded, awaited: Event) -> tuple[int, ...]:
    """The peers that have not posted what lets this wait end; empty if it will end."""
    if awaited.kind == COLLECTIVE:
        call = record.call_of(awaited)
        return tuple(rank for rank in call.ranks if rank not in call.events)
    message = record.message_of(awaited)
    is_matched = message.sent is not None and message.received is not None
    return () if is_matched else awaited.peers


def _unequal_messages(record: Recorded) -> Iterator[Message]:
    for message in record.messages:
        if message.sent is None or message.received is None:
            continue
        sent, received = message.sent.tensor, message.received.tensor
        assert sent is not None
        assert received is not None
        if (sent.nbytes, sent.dtype) != (received.nbytes, received.dtype):
            yield message


def _size_mistake(message: Message) -> str:
    """The sentence about a message of which both sides differ; its subject is the receiver."""
    assert message.sent is not None
    assert message.received is not None
    sent, received = message.sent.tensor, message.received.tensor
    assert sent is not None
    assert received is not None
    other = _inside(message.within) if message.within != message.into else ""
    start = f"waits{_inside(message.into)}{_at(message.received)} for"
    if sent.nbytes == received.nbytes:
        return (
            f"{start} {received} from rank {message.source}, which sent {sent}{other}"
            f"{_at(message.sent)}: the dtypes differ"
        )
    return (
        f"{start} {received.nbytes} bytes ({received}) from rank {message.source}, which sent "
        f"{sent.nbytes} ({sent}){other}{_at(message.sent)}"
    )


def _difference(call: Call) -> tuple[int, str] | None:
    """The rank that differs from most others in a collective, and both sides."""
    sides = {rank: _side(call, event) for rank, event in call.events.items()}
    (usual, _), *others = Counter(sides.values()).most_common()
    if not others:
        return None
    rank = next(rank for rank, side in sides.items() if side != usual)
    other = next(rank for rank, side in sides.items() if side == usual)
    mine, theirs = call.events[rank], call.events[other]
    if mine.name != theirs.name:
        return rank, (
            f"calls {call.names[rank]}{_at(mine)} where rank {other} calls "
            f"{call.names[other]}{_at(theirs)}; all ranks of a group must call the same collectives"
            " in the same order"
        )
    assert mine.tensor is not None
    assert theirs.tensor is not None
    what = "dtype" if mine.tensor.dtype != theirs.tensor.dtype else "shape"
    return rank, (
        f"calls {call.names[rank]}{_at(mine)} with {mine.tensor}, rank {other} with "
        f"{theirs.tensor}; the {what} must be the same on all ranks"
    )


def _side(call: Call, event: Event) -> tuple[str, TensorInfo | None]:
    """What must be equal on all ranks."""
    tensor = event.tensor
    if tensor is not None:
        has_equal_shapes = not call.is_torch or event.name in EQUAL_SHAPES
        shape = tensor.shape if has_equal_shapes else ()
        tensor = TensorInfo(tensor.dtype, shape, 0)
    return event.name, tensor


def _traffic(record: Recorded, source: int, target: int) -> tuple[int, int]:
    between = [one for one in record.messages if (one.source, one.target) == (source, target)]
    sent = sum(one.sent is not None for one in between)
    return sent, sum(one.received is not None for one in between)


def _bytes(event: Event) -> str:
    assert event.tensor is not None
    return f"{event.tensor.nbytes} bytes"


def _content(event: Event) -> str:
    assert event.tensor is not None
    return f"{event.tensor.nbytes} bytes ({event.tensor})"


def _messages(number: int) -> str:
    return "message" if number == 1 else "messages"


def _inside(name: str) -> str:
    return f" in {name}" if name else ""


def _at(event: Event) -> str:
    return f" at {event.where}" if event.where else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
