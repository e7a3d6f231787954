"""Steps: a recorded run on a clock of equal steps. Needs no torch.

Wall times of small messages are noise, and differ in every run. On this clock a message takes one
step, a device sends and receives at most one message at a time, and a message does not wait for its
receiver. Computation takes no time, except for the blocks of `torch.profiler.record_function`: one
step for each in which nothing is posted or awaited. A collective of torch.distributed, whose
messages are not visible, takes one step once all its ranks have called it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

from titanlite.lab.record import (
    COLLECTIVE,
    ENTER,
    LEAVE,
    RECEIVE,
    SEND,
    WAIT,
    Block,
    Event,
    Flight,
    Record,
    Steps,
    TorchCall,
)


def make_steps(record: Record) -> Steps:
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
    def __init__(self, record: Record) -> None:
        self.record = record
        self.programs: defaultdict[tuple[int, int], _Program] = defaultdict(_Program)
        self.posts: dict[tuple[int, int], Event] = {}
        for of_rank in record.events:
            for event in of_rank:
                self.programs[event.rank, event.thread].events.append(event)
                if event.kind in (SEND, RECEIVE, COLLECTIVE):
                    self.posts[event.rank, event.number] = event
        self.sender_free: defaultdict[int, int] = defaultdict(int)
        self.receiving: defaultdict[int, set[int]] = defaultdict(set)
        # By id of a Message or a Call: when it ends, and when ranks have reached it.
        self.ends: dict[int, int] = {}
        self.reached: defaultdict[int, list[int]] = defaultdict(list)
        self.steps = Steps()

    def run(self) -> Steps:
        """Always advance the program whose clock is the earliest of those that can go on."""
        ready = [(0, key) for key in sorted(self.programs)]
        blocked: list[tuple[int, int]] = []
        while ready:
            _, key = heapq.heappop(ready)
            program = self.programs[key]
            if program.place == len(program.events):
                continue
            if not self.advance(program, program.events[program.place]):
                blocked.append(key)
                continue
            program.place += 1
            for freed in [key, *blocked]:
                heapq.heappush(ready, (self.programs[freed].now, freed))
            blocked.clear()
        ends = [program.now for program in self.programs.values()]
        self.steps.length = max([*ends, *self.ends.values()], default=0)
        return self.steps

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
            self.send(program.now, event)
        elif event.kind == COLLECTIVE:
            self.call(program.now, event)
        elif event.kind == ENTER:
            program.open.append((event, program.now, [True]))
        elif event.kind == LEAVE:
            self.leave(program)
        if event.kind in (WAIT, SEND, RECEIVE, COLLECTIVE):
            for _, _, is_work in program.open:
                is_work[0] = False
        return True

    def send(self, now: int, event: Event) -> None:
        message = self.record.message_of(event)
        start = max(now, self.sender_free[message.source])
        # Messages of different ranks may arrive in any order.
        while start in self.receiving[message.target]:
            start += 1
        self.receiving[message.target].add(start)
        self.sender_free[message.source] = start + 1
        self.ends[id(message)] = start + 1
        self.steps.flights.append(Flight(message, start))

    def call(self, now: int, event: Event) -> None:
        call = self.record.call_of(event)
        reached = self.reached[id(call)]
        reached.append(now)
        if len(reached) == len(call.ranks):
            start = max([*reached, *(self.sender_free[rank] for rank in call.ranks)])
            self.ends[id(call)] = start + 1
            for rank in call.ranks:
                self.sender_free[rank] = start + 1
            self.steps.calls.append(TorchCall(call, start))

    def leave(self, program: _Program) -> None:
        event, start, is_work = program.open.pop()
        if is_work[0]:
            # Of nested blocks of work, the innermost takes the time.
            for _, _, outer in program.open:
                outer[0] = False
            program.now += 1
        block = Block(event.rank, event.name, start, program.now, is_work[0])
        self.steps.blocks.append(block)
