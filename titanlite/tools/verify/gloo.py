"""One gloo device for all process groups of a process.

A device of gloo has a thread that wakes a hundred times a second, and each group makes a device of
its own: with a hundred groups, a rank spends a tenth of a core on waiting. PyTorch's options can
share a device, but new_group and init_device_mesh do not pass them on.
"""

from typing import Any

from torch.distributed import distributed_c10d


def share_device() -> None:
    """Let all groups that this process creates from now on use one device."""
    gloo: Any = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []

    class Kind(type):
        def __instancecheck__(cls, group: Any) -> bool:
            return isinstance(group, gloo)

        def __getattr__(cls, name: str) -> Any:
            return getattr(gloo, name)

    class OnSharedDevice(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> Any:
            options = gloo._Options()
            if any(not hasattr(options, name) for name in others):
                return gloo(store, rank, size, timeout, **others)
            if not devices:
                devices.append(gloo.create_default_device())
            # Two threads are the number that it has without options.
            own = {"_timeout": timeout, "_devices": devices, "_threads": 2}
            for name, value in {**own, **others}.items():
                setattr(options, name, value)
            return gloo(store, rank, size, options)

    vars(distributed_c10d)["ProcessGroupGloo"] = OnSharedDevice
