"""The figures of a run, one record a step: metrics.jsonl always, TensorBoard and W&B where asked.

Also the few measures that turn into figures here: peak memory, bits per dimension, and model
FLOP/s utilization against what a known GPU can do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from pydantic import TypeAdapter

from titanlite.errors import ConfigError
from titanlite.files import hold, open_regular

FILE_NAME = "metrics.jsonl"
# The ranks of a run that was killed may take so long to end, and let go of the file.
PATIENCE_SECONDS = 10.0


@dataclass
class StepRecord:
    """What one optimizer step came to, over all ranks.

    `loss` and `validation_loss` are nats a token, `seconds` is the step's own wall-clock time,
    `memory_bytes` the peak of the largest rank, `mfu` a fraction of 1. A None was not measured.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    validation_loss: float | None = None
    bits_per_dim: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None


class MetricsLog:
    """Writes each StepRecord to {dump_folder}/metrics.jsonl, and to the writers asked for.

    One JSON object a line, flushed at once: a run that dies leaves every step it finished. A
    number that is not finite is written as null, since JSON has no NaN; keys of measures not
    taken are left out.

    One run at a time writes to the file: it is locked. It holds one record a step: before the first
    one is written, lines of steps from `first_step` on, and lines that are no records, move to
    metrics.N.jsonl, N the next free number. So a new run starts clean, a resumed one goes on where
    its checkpoint was, and nothing that was recorded is lost. Where a whole run moves, the files of
    `pictures` that are there move with it, as NAME.N.png.

    TensorBoard files go to {dump_folder}/{save_tb_folder}/{time of start}; W&B reads its own
    WANDB_* variables and gets `job_config`. With `enabled` False (every rank but the first)
    nothing is written. Raises ConfigError where a writer's package is missing, and where another
    run is writing to the file.
    """

    def __init__(
        self,
        dump_folder: str | Path,
        *,
        enable_tensorboard: bool = False,
        save_tb_folder: str = "tb",
        enable_wandb: bool = False,
        job_config: Mapping[str, Any] | None = None,
        first_step: int = 1,
        pictures: Sequence[str] = (),
        enabled: bool = True,
    ) -> None:
        self._file: BinaryIO | None = None
        self._first_step, self._pictures = first_step, pictures
        self._has_written = False
        self._tensorboard = None
        self._wandb = None
        if not enabled:
            return
        check_extras(enable_tensorboard=enable_tensorboard, enable_wandb=enable_wandb)
        folder = Path(dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = _open_held(self.path)
        if enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            started = datetime.now().strftime("%Y%m%d-%H%M%S")
            self._tensorboard = SummaryWriter(str(folder / save_tb_folder / started))
        if enable_wandb:
            import wandb

            self._wandb = wandb.init(dir=str(folder), config=dict(job_config or {}))

    def log(self, record: StepRecord) -> str:
        """Append one step. A line for a person, or "": on records that were there and moved."""
        if self._file is None:
            return ""
        moved = "" if self._has_written else self._make_way()
        self._has_written = True
        measured = {key: value for key, value in asdict(record).items() if value is not None}
        written = {key: value if math.isfinite(value) else None for key, value in measured.items()}
        self._file.write(json.dumps(written, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()
        figures = {key: value for key, value in measured.items() if key != "step"}
        if self._tensorboard is not None:
            for key, value in figures.items():
                self._tensorboard.add_scalar(key, value, record.step)
        if self._wandb is not None:
            self._wandb.log(figures, step=record.step)
        return moved

    def _make_way(self) -> str:
        """Move what is not a record of a step before the first; what was moved, and where to."""
        assert self._file is not None
        kept: list[bytes] = []
        moved: list[bytes] = []
        self._file.seek(0)
        for line in self._file:
            record = _record_of(line)
            is_kept = record is not None and record.step < self._first_step
            if line.strip():
                (kept if is_kept else moved).append(line)
        if not moved:
            return ""
        folder = self.path.parent
        pictures = [name for name in self._pictures if self._first_step == 1]
        number = next(
            n
            for n in itertools.count(1)
            if not any(os.path.lexists(folder / _numbered(p, n)) for p in (FILE_NAME, *pictures))
        )
        with (folder / _numbered(FILE_NAME, number)).open("xb") as file:
            file.writelines(moved)
            file.flush()
            os.fsync(file.fileno())
        names = [_numbered(FILE_NAME, number)]
        for name in pictures:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).rename(folder / _numbered(name, number))
                names.append(_numbered(name, number))
        # Put in its place in one go, and held before it is there: a run killed here keeps its past,
        # and no other run comes in between.
        shorter = self.path.with_name(f"{FILE_NAME}.new")
        shorter.unlink(missing_ok=True)
        opened = _open_to_append(shorter)
        hold(opened.fileno(), 0)
        opened.writelines(kept)
        opened.flush()
        os.fsync(opened.fileno())
        shorter.replace(self.path)
        self._file.close()
        self._file = opened
        what = "an earlier run" if self._first_step == 1 else f"step {self._first_step} and later"
        return f"metrics: the records of {what} are kept in {', '.join(names)}"

    def close(self) -> None:
        """Close the file and the writers; a second call does nothing."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._tensorboard = self._wandb = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The records of a metrics.jsonl, or of the dump folder that holds one, in the file's order.

    null is read as NaN; keys that StepRecord lacks are passed over. A last line that was cut
    short is left out. Raises ConfigError where another line is no record, and where the file cannot
    be read.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    records = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                record = _record_of(line)
                if record is not None:
                    records.append(record)
                elif line.endswith(b"\n") and line.strip():
                    raise ConfigError(f"job.dump_folder: line {number} of {path} is no record")
    except OSError as error:
        raise ConfigError(f"job.dump_folder: {path}: {error.strerror or error}") from error
    return records


def check_extras(*, enable_tensorboard: bool, enable_wandb: bool) -> None:
    """Refuse a writer whose package is not installed, naming the extra that brings it.

    Imports nothing, so it can be asked before any rank is started. Raises ConfigError.
    """
    wanted = {"tensorboard": enable_tensorboard, "wandb": enable_wandb}
    problems = [
        f"metrics.enable_{package}: the package {package} is not installed; "
        f"pip install 'titanlite[{package}]' or set it to false"
        for package, enabled in wanted.items()
        if enabled and package not in sys.modules and importlib.util.find_spec(package) is None
    ]
    if problems:
        raise ConfigError(*problems)


def bits_per_dim(loss_nats: float) -> float:
    """A loss in nats a token as bits a token: of images, the bits per dimension of the papers."""
    return loss_nats / math.log(2)


def peak_memory_bytes(device: torch.device | str) -> int:
    """The most memory this rank has held: allocated on its GPU, or resident on CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage counts kibibytes on Linux and bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def mfu(flops_per_second: float, gpu_name: str, num_gpus: int) -> float | None:
    """Model FLOP/s utilization, the fraction of the GPUs' peak; None on a GPU not known here.

    `flops_per_second` counts the model's own operations over all GPUs, none of recomputation.
    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    peak = peak_flops_per_second(gpu_name)
    return None if peak is None else flops_per_second / (peak * num_gpus)


# Dense bfloat16 matrix peaks of the vendors' data sheets. The first entry whose words all stand in
# the device's name wins, so variants come before the plain name.
_PEAK_FLOPS_PER_SECOND = (
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("GH200", 989e12),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIE", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800 PCIE", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI355X", 2.5e15),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),
)


def peak_flops_per_second(gpu_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its CUDA device name; None where it is not known.

    A MIG slice is not known: its name says the whole GPU.
    """
    name = gpu_name.upper()
    if "MIG" in name.split():
        return None
    return next((peak for part, peak in _PEAK_FLOPS_PER_SECOND if _has_words(name, part)), None)


def _has_words(name: str, part: str) -> bool:
    """Whether `part` stands in `name` as whole words: L4 is not in L40, H20 not in H200."""
    words = name.replace("-", " ").split()
    return all(word in words for word in part.split())


_RECORD = TypeAdapter(StepRecord)
# Longer than any record.
_MOST_CHARACTERS = 10_000


def _record_of(line: bytes) -> StepRecord | None:
    """The record that a line holds, None where it holds none."""
    if len(line) > _MOST_CHARACTERS or not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        record = _RECORD.validate_python({k: math.nan if v is None else v for k, v in row.items()})
    except (ValueError, AttributeError, RecursionError):
        return None
    return record if record.step >= 0 else None


def _numbered(name: str, number: int) -> str:
    """ "metrics.3.jsonl" for "metrics.jsonl"."""
    path = Path(name)
    return f"{path.stem}.{number}{path.suffix}"


def _open_held(path: Path) -> BinaryIO:
    """The file, which no other run writes to as long as it is open."""
    while True:
        file = _open_to_append(path)
        try:
            if not hold(file.fileno(), PATIENCE_SECONDS):
                raise ConfigError(
                    f"job.dump_folder: another run is writing to {path.parent}; end that one, or "
                    "give another folder"
                )
            # The run that held it may have put another one in its place.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open_to_append(path: Path) -> BinaryIO:
    path.touch()
    # A pipe would keep it waiting.
    open_regular(path).close()
    return path.open("a+b")
