"""Slow links and slow devices, to make a run on one machine take time as real hardware does.

A cluster with a `Link` delays every message between devices by sleeping; with a number of FLOP/s it
delays matrix products in the same way (recorder.py). Devices that sleep do not compete for cores,
so the times are those of a cluster in which every device has its own hardware, and overlap can be
seen.
"""

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The speed of every device's port: a message of n bytes takes latency + n / bandwidth.

    A message starts when it has been sent and its receive has been posted, as with gloo and NCCL. A
    port sends one message at a time, and receives one at a time while it sends. Raises ValueError
    for a negative or infinite latency, or a bandwidth that is not positive.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(
                f"latency_seconds: {self.latency_seconds} is not a latency; use 0 or more"
            )
        if not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second: {self.bytes_per_second} is not a bandwidth; use more than 0"
            )

    def seconds(self, num_bytes: int) -> float:
        """The time of one message on an idle link."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


class Port:
    """One device's end of its link: until when it is busy sending, and receiving.

    Times are those of `time.monotonic`, which all processes of a machine share. The sender reserves
    its port when it sends, even if the receive is posted later.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._sends_until = 0.0
        self._receives_until = 0.0

    def send(self, num_bytes: int) -> tuple[float, float]:
        """Reserve the port for a message: when its first and its last byte leave."""
        start = max(time.monotonic(), self._sends_until)
        self._sends_until = start + num_bytes / self.link.bytes_per_second
        return start, self._sends_until

    def receive(self, sent: float, posted: float, num_bytes: int) -> float:
        """When the last byte of a message has arrived that left at `sent`, received since `posted`.

        Messages are received in the order of these calls.
        """
        start = max(sent, posted, self._receives_until)
        self._receives_until = start + num_bytes / self.link.bytes_per_second
        return self._receives_until + self.link.latency_seconds


def sleep_until(moment: float) -> None:
    """Sleep until `time.monotonic()` has reached `moment`."""
    while (remaining := moment - time.monotonic()) > 0:
        time.sleep(remaining)
