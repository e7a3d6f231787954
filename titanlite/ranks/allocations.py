"""What torch allocates for one rank that is a thread, where the process has many ranks.

    allocations = Allocations()  # on the CPU; Allocations("cuda"): on the GPU
    allocations.start()          # on the thread of the rank
    allocations.stop()           # before too many are kept: 300 bytes each
    allocations.peak_bytes

torch's older profiler reports what the thread that it is on for allocates and releases. With its
record of operators off, that costs some microseconds an operator.
"""

from typing import Any

import torch
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _enable_record_function,
)


class Allocations:
    """The bytes that a thread has allocated and not released since the first `start`, and the peak.

    What another thread releases for it is not seen. `start` and `stop` must not be called during a
    backward pass, whose end restores what torch kept by thread before it.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.bytes = self.peak_bytes = 0
        self._usage = f"{device_type}_memory_usage"

    def start(self) -> None:
        """Count from here on. No other profiler may start on this thread until `stop`."""
        _enable_record_function(False)
        _enable_profiler_legacy(_config())

    def stop(self) -> None:
        """Add what was allocated and released since `start`."""
        records = _disable_profiler_legacy()
        _enable_record_function(True)
        for events in records:
            for event in events:
                if event.kind() == "memory_alloc":
                    self.bytes += getattr(event, self._usage)()
                    self.peak_bytes = max(self.peak_bytes, self.bytes)


def _config() -> Any:
    options: Any = torch._C._profiler._ExperimentalConfig()
    # Shapes no, memory yes, stacks, operations and modules no.
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, options)
