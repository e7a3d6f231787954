"""A link between local ranks that takes a given time for each message.

Each pair of ranks has a link in each direction: a message starts when the one before has arrived.
gloo then moves the data in almost no time. Only sends are delayed, so a pipeline's messages and a
ring's are, and collectives are not.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from titanlite.tools.planner.hardware import CollectiveCost, Hardware


class _Sent(dist.Work):
    """A message on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.has_left = threading.Event()
        self.work: Any = None

    def wait(self, *_: Any) -> bool:
        self.has_left.wait()
        return bool(self.work.wait())

    def is_completed(self) -> bool:
        return self.has_left.is_set() and bool(self.work.is_completed())


@contextlib.contextmanager
def slow_link(latency_seconds: float, bytes_per_second: float) -> Iterator[None]:
    """Inside, messages that this rank sends take a latency and a time for their bytes."""
    send = dist.ProcessGroup.send
    links: dict[int, queue.SimpleQueue[Any]] = {}
    carriers = []

    def carry(link: queue.SimpleQueue[Any]) -> None:
        while (item := link.get()) is not None:
            sent, arguments = item
            num_bytes = sum(one.numel() * one.element_size() for one in arguments[1])
            time.sleep(latency_seconds + num_bytes / bytes_per_second)
            sent.work = send(*arguments)
            sent.has_left.set()

    def delayed(*arguments: Any) -> _Sent:
        peer = arguments[2]
        if peer not in links:
            links[peer] = queue.SimpleQueue()
            carriers.append(threading.Thread(target=carry, args=(links[peer],), daemon=True))
            carriers[-1].start()
        sent = _Sent()
        links[peer].put((sent, arguments))
        return sent

    try:
        with patch.object(dist.ProcessGroup, "send", delayed):
            yield
    finally:
        for link in links.values():
            link.put(None)
        for carrier in carriers:
            carrier.join()


def with_link(hardware: Hardware, latency_seconds: float, bytes_per_second: float) -> Hardware:
    """The hardware with such a link between its ranks."""
    cost = CollectiveCost(latency_seconds, 0.0, bytes_per_second)
    links = {"send": cost, "receive": cost}
    return replace(hardware, collectives={**hardware.collectives, **links})
