"""Steps: a recorded run on a clock of equal steps. Needs no torch.

Wall times of small messages are noise, and differ in every run. On this clock a message takes one
step, a device sends and receives at most one message at a time, and a message does not wait for its
receiver. Computation takes no time, except for the blocks of `torch.profiler.record_function`: one
step for each in which nothing is posted or awaited. A collective of torch.distributed, whose
messages are not visible, takes one step once all its ranks have called it.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from titanlite.tools.lab.record import (
    COLLECTIVE,
    ENTER,
    LEAVE,
    RECEIVE,
    SEND,
    WAIT,
    Block,
    Call,
    Event,
    Flight,
    Message,
    Recorded,
    Steps,
    TorchCall,
)


def make_steps(record: Recorded) -> Steps:
    """Run the events of all ranks on the clock; events that never happened are left out."""
    return _Clock(record).run()


@dataclass
class _Program:
    """The events of one thread of a rank, how far they have been run, and its clock."""

    events: list[Event] = field(default_factory=list)
    place: int = 0
    now: int = 0
    # Open blocks: the event, its start, and whether nothing was posted or awaited inside.
    open: list[tuple[Event, int, list[bool]]] = field(default_factory=list)


class _Clock:
    def __init__(self, record: Recorded) -> None:
        self.record = record
        self.programs: defaultdict[tuple[int, int], _Program] = defaultdict(_Program)
        self.posts: dict[tuple[int, int], Event] = {}
        for of_rank in record.events:
            for event in of_rank:
                self.programs[event.rank, event.thread].events.append(event)
                if event.kind in (SEND, RECEIVE, COLLECTIVE):
                    self.posts[event.rank, event.number] = event
        # Messages that wait for their sender or receiver to be free, by sender.
        self.queues: list[list[Message]] = [[] for _ in record.events]
        # Torch collectives that have begun on some ranks: how many are missing.
        self.calls: dict[int, tuple[Call, int]] = {}
        # By id of a Message or a Call: when it ends.
        self.ends: dict[int, int] = {}
        self.steps = Steps()

    def run(self) -> Steps:
        time = 0
        while self.run_programs(time) | self.start(time) | self.is_later(time):
            time += 1
        ends = [program.now for program in self.programs.values()]
        self.steps.length = max([*ends, *self.ends.values()], default=0)
        return self.steps

    def run_programs(self, time: int) -> bool:
        """Run the programs as far as they come at this time; False if none came further."""
        has_run = False
        for _, program in sorted(self.programs.items()):
            while program.now <= time and program.place < len(program.events):
                program.now = time
                if not self.advance(program, program.events[program.place]):
                    break
                program.place += 1
                has_run = True
        return has_run

    def is_later(self, time: int) -> bool:
        """Whether a program goes on at a later time."""
        return any(
            program.now > time and program.place < len(program.events)
            for program in self.programs.values()
        )

    def start(self, time: int) -> bool:
        """Start what can: one message from and to each rank, then complete collectives."""
        receivers: set[int] = set()
        senders: set[int] = set()
        for sender, queue in enumerate(self.queues):
            free = [message for message in queue if message.target not in receivers]
            if free:
                message = free[0]
                queue.remove(message)
                senders.add(sender)
                receivers.add(message.target)
                self.ends[id(message)] = time + 1
                self.steps.flights.append(Flight(message, time))
        for key, (call, num_missing) in list(self.calls.items()):
            if not num_missing and not senders.intersection(call.ranks):
                senders.update(call.ranks)
                del self.calls[key]
                self.ends[key] = time + 1
                self.steps.calls.append(TorchCall(call, time))
        return bool(senders or receivers)

    def advance(self, program: _Program, event: Event) -> bool:
        """Run one event; False if an event of another program must come first."""
        if event.kind == WAIT:
            awaited = self.posts[event.rank, event.number]
            is_call = awaited.kind == COLLECTIVE
            what = self.record.call_of(awaited) if is_call else self.record.message_of(awaited)
            if id(what) not in self.ends:
                return False
            program.now = max(program.now, self.ends[id(what)])
        elif event.kind == SEND:
            self.queues[event.rank].append(self.record.message_of(event))
        elif event.kind == COLLECTIVE:
            call = self.record.call_of(event)
            _, num_missing = self.calls.get(id(call), (call, len(call.ranks)))
            self.calls[id(call)] = (call, num_missing - 1)
        elif event.kind == ENTER:
            program.open.append((event, program.now, [True]))
        elif event.kind == LEAVE:
            self.leave(program)
        if event.kind in (WAIT, SEND, RECEIVE, COLLECTIVE):
            for _, _, is_work in program.open:
                is_work[0] = False
        return True

    def leave(self, program: _Program) -> None:
        event, start, is_work = program.open.pop()
        if is_work[0]:
            # Of nested blocks of work, the innermost takes the time.
            for _, _, outer in program.open:
                outer[0] = False
            program.now += 1
        block = Block(event.rank, event.name, start, program.now, is_work[0])
        self.steps.blocks.append(block)
