"""A CUDA device without a GPU, for fake tensors: its streams and events do nothing.

`pretend` changes torch for the whole process and is never undone, so it is called in a process of
its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
BUILT = Path(__file__).parents[2] / "build/fake_cuda"


class Stream(torch.Stream):
    """torch.cuda.Stream; all are the one stream of the device."""

    def __new__(cls, *_: Any, **__: Any) -> Stream:
        return super().__new__(cls, device="cuda:0")


class Event(torch.Event):
    """torch.cuda.Event, which has always happened."""

    def __new__(cls, *_: Any, **__: Any) -> Event:
        return super().__new__(cls, device="cuda:0")


def pretend() -> None:
    """Let this process have one CUDA device, with the capability of an H100."""
    ctypes.CDLL(str(_library())).pretend()
    # torch.tensor(.., device="cuda") makes a CPU tensor, and copies it in sight of dispatch modes.
    torch._C._set_only_lift_cpu_tensors(True)
    stream = Stream()
    replaced = {
        "Stream": Stream,
        "Event": Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_properties": lambda *_: SimpleNamespace(
            major=9, minor=0, multi_processor_count=132
        ),
        "is_bf16_supported": lambda *_, **__: True,
        "default_generators": (torch.Generator(),),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
    }
    # Pinned memory is the driver's.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name, stand_in in replaced.items():
        setattr(torch.cuda, name, stand_in)


def _library() -> Path:
    """The compiled device.cpp, for this torch."""
    root = Path(torch.__file__).parent
    library = BUILT / f"{torch.__version__}-{SOURCE.stat().st_mtime_ns}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{root}/include"]
        command += [str(SOURCE), "-o", str(made), f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        made.replace(library)
    return library
