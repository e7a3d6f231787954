"""Mistakes of a run, read from its record: what was called, sent and awaited on both sides.

A deadlock needs no timeout to be seen. A device that waits can go on only when a certain peer posts
something. If every one of those peers has ended or waits in the same way, none ever will.
"""

from collections import Counter

from titanlite.errors import RankError, number_ranks
from titanlite.tools.lab.pictures import Record
from titanlite.tools.lab.record import COLLECTIVE, RECEIVE, RETURN, SEND, WAIT, Call, Event

# What CommunicationError.kind may be.
COLLECTIVES, SIZE, DTYPE = "collectives", "size", "dtype"
DEADLOCK, UNRECEIVED = "deadlock", "unreceived"
# The collectives of torch.distributed whose tensors have the same shape on all ranks.
EQUAL_SHAPES = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"}


class CommunicationError(RankError):
    """Devices do not agree on what they send, receive or call together; all of them were ended.

    `kind` is one of COLLECTIVES (unequal collectives), SIZE and DTYPE (of a message), DEADLOCK and
    UNRECEIVED. `record` is the record of the run.
    """

    def __init__(self, rank: int, message: str, kind: str, record: Record) -> None:
        super().__init__(rank, message)
        self.kind = kind
        self.record = record

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.message, self.kind, self.record)


def check_agreement(record: Record, *, is_running: bool = False) -> None:
    """Raise CommunicationError if both sides of a collective or a message differ.

    While the run goes on, only collectives are compared that all of their ranks have called, so
    that the rank that differs from the others is named.
    """
    unequal = _unequal_message(record)
    for call in record.calls:
        difference = _difference(call) if call.is_complete or not is_running else None
        if difference is not None:
            rank, text = difference
            if unequal is not None:
                text += f"; rank {unequal.rank} {unequal.message}"
            raise CommunicationError(rank, text, COLLECTIVES, record)
    if unequal is not None:
        raise unequal


def check_received(record: Record) -> None:
    """Raise CommunicationError if a message of a run that has ended was sent or awaited in vain."""
    for message in record.messages:
        if message.sent and message.received:
            continue
        source, target = message.source, message.target
        between = [one for one in record.messages if (one.source, one.target) == (source, target)]
        num_sent = sum(one.sent is not None for one in between)
        num_received = sum(one.received is not None for one in between)
        if message.sent:
            rank = source
            text = (
                f"sent {num_sent} message{'s' * (num_sent > 1)} to rank {target}, which received "
                f"{num_received}: nothing receives {_content(message.sent)}"
                f"{_inside(message.within)}{_at(message.sent)}; every send needs a matching "
                "receive"
            )
        elif message.received:
            rank = target
            text = (
                f"started {num_received} receive{'s' * (num_received > 1)} from rank {source}, "
                f"which sent {num_sent}: nothing was sent for the receive"
                f"{_inside(message.into)}{_at(message.received)}; every receive needs a matching "
                "send"
            )
        raise CommunicationError(rank, text, UNRECEIVED, record)


def check_deadlock(record: Record) -> None:
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
    record: Record,
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


def _wait(record: Record, awaited: Event, missing: tuple[int, ...]) -> str:
    """What a rank waits for; ends with the rank that it waits for."""
    if awaited.kind == COLLECTIVE:
        name = record.names[awaited.rank, awaited.number]
        return f"waits in {name}{_at(awaited)} for {number_ranks(missing)}"
    message = record.message_of(awaited)
    if awaited.kind == SEND:
        place = f"{_inside(message.within)}{_at(awaited)}"
        return f"waits{place} until its {_content(awaited)} are received by rank {message.target}"
    place = f"{_inside(message.into)}{_at(awaited)}"
    return f"waits{place} for {awaited.tensor.nbytes} bytes from rank {message.source}"


def _missing(record: Record, awaited: Event) -> tuple[int, ...]:
    """The peers that have not posted what lets this wait end; empty if it will end."""
    if awaited.kind == COLLECTIVE:
        call = record.call_of(awaited)
        return tuple(rank for rank in call.ranks if rank not in call.events)
    message = record.message_of(awaited)
    is_matched = message.sent is not None and message.received is not None
    return () if is_matched else awaited.peers


def _unequal_message(record: Record) -> CommunicationError | None:
    """The first message whose sides differ, as the mistake of its receiver."""
    for message in sorted(record.messages, key=lambda one: (one.target, one.source)):
        if message.sent is None or message.received is None:
            continue
        sent, received = message.sent.tensor, message.received.tensor
        if (sent.nbytes, sent.dtype) == (received.nbytes, received.dtype):
            continue
        place = f"{_inside(message.into)}{_at(message.received)}"
        other = _inside(message.within) if message.within != message.into else ""
        other += _at(message.sent)
        if sent.nbytes == received.nbytes:
            kind, want, got = DTYPE, f"{received}", f"{sent}{other}: the dtypes differ"
        else:
            kind, want = SIZE, f"{received.nbytes} bytes ({received})"
            got = f"{sent.nbytes} ({sent}){other}"
        text = f"waits{place} for {want} from rank {message.source}, which sent {got}"
        return CommunicationError(message.target, text, kind, record)
    return None


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
    what = "dtype" if mine.tensor.dtype != theirs.tensor.dtype else "shape"
    return rank, (
        f"calls {call.names[rank]}{_at(mine)} with {mine.tensor}, rank {other} with "
        f"{theirs.tensor}; the {what} must be the same on all ranks"
    )


def _side(call: Call, event: Event) -> tuple[str, str, tuple[int, ...]]:
    """What must be equal on all ranks."""
    has_equal_shapes = not call.is_torch or event.name in EQUAL_SHAPES
    return event.name, event.tensor.dtype, event.tensor.shape if has_equal_shapes else ()


def _content(event: Event) -> str:
    return f"{event.tensor.nbytes} bytes ({event.tensor})"


def _inside(name: str) -> str:
    return f" in {name}" if name else ""


def _at(event: Event) -> str:
    return f" at {event.where}" if event.where else ""
