"""The streams of a GPU, followed where there is none.

FSDP2 issues its communication on streams of its own, which wait for each other by events. On the
CPU its streams do nothing, and each collective is waited for at once. These stand-ins find out what
waits for what, from FSDP2's own calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch


@dataclass(frozen=True)
class StreamState:
    """What a stream has done when all before it is done: communications, and main-stream events."""

    numbers: tuple[int, ...] = ()
    position: int = 0


class Streams:
    """The main stream, and those made beside it.

    `position` gives the number of events recorded so far, all of which are of the main stream.
    `on_wait` is called with the communications that the main stream waits for.
    """

    def __init__(
        self, position: Callable[[], int], on_wait: Callable[[tuple[int, ...]], None]
    ) -> None:
        self._position, self._on_wait = position, on_wait
        self.main = DeviceStream(self)
        self.current = self.main
        self._done: set[int] = set()
        self._beside: list[DeviceStream] = []

    @property
    def is_beside(self) -> bool:
        """Whether what is issued now runs on another stream than the main one."""
        return self.current is not self.main

    def issue(self, number: int) -> StreamState:
        """Note a communication on the current stream; returns what comes before it."""
        before = self.state_of(self.current)
        if self.is_beside:
            self.current.event = StreamState((*before.numbers, number), before.position)
        return before

    def state_of(self, stream: DeviceStream) -> StreamState:
        """What has to be done before anything that is issued on `stream` now."""
        if stream is self.main:
            return StreamState((), self._position())
        numbers = tuple(number for number in stream.event.numbers if number not in self._done)
        return StreamState(numbers, stream.event.position)

    def wait(self, stream: DeviceStream, event: StreamState) -> None:
        """Let what is issued on `stream` from now on wait for `event`."""
        missing = tuple(number for number in event.numbers if number not in self._done)
        if stream is self.main:
            self._done.update(missing)
            self._on_wait(missing)
        else:
            known = stream.event
            new = tuple(number for number in missing if number not in known.numbers)
            position = max(known.position, event.position)
            stream.event = StreamState((*known.numbers, *new), position)

    def restart(self) -> None:
        """Count positions from zero: the recorded events start again, all former ones are done."""
        for stream in self._beside:
            stream.event = StreamState()

    @contextlib.contextmanager
    def in_place_of(self, device: ModuleType) -> Iterator[None]:
        """Inside, these are the streams of a module such as torch.cuda."""

        def make(*_: object, **__: object) -> DeviceStream:
            self._beside.append(DeviceStream(self))
            return self._beside[-1]

        @contextlib.contextmanager
        def enter(stream: DeviceStream) -> Iterator[None]:
            before, self.current = self.current, stream
            try:
                yield
            finally:
                self.current = before

        with (
            patch.object(device, "Stream", make),
            patch.object(device, "Event", lambda *_, **__: StreamEvent(self)),
            patch.object(device, "current_stream", lambda *_: self.current),
            patch.object(device, "stream", enter),
        ):
            yield


class DeviceStream:
    """The methods of a torch.cuda.Stream that FSDP2 calls."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.event = StreamState()

    def wait_stream(self, stream: DeviceStream) -> None:
        self._streams.wait(self, self._streams.state_of(stream))

    def record_event(self) -> StreamEvent:
        marker = StreamEvent(self._streams)
        marker.record(self)
        return marker

    def wait_event(self, marker: StreamEvent) -> None:
        self._streams.wait(self, marker.event)


class StreamEvent:
    """The methods of a torch.cuda.Event that FSDP2 calls."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.event = StreamState()

    def record(self, stream: DeviceStream | None = None) -> None:
        self.event = self._streams.state_of(stream or self._streams.current)

    def wait(self, stream: DeviceStream | None = None) -> None:
        self._streams.wait(stream or self._streams.current, self.event)

    def synchronize(self) -> None:
        self._streams.wait(self._streams.main, self.event)
