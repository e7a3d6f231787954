"""The metrics of a run, one record per step: metrics.jsonl, and on request TensorBoard and W&B.

Also computes peak memory and model FLOP/s utilization for known GPUs.
"""

import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from titanlite.errors import ConfigError
from titanlite.files import hold, open_regular

FILE_NAME = "metrics.jsonl"
# How long the ranks of a killed run may take to end and release the file.
PATIENCE_SECONDS = 10.0
VALIDATION = "validation_"
# What the names of a data set's measures start with.
MEASURES = ("bits_per_", "perplexity")


@dataclass
class StepRecord:
    """The metrics of one optimizer step, over all ranks.

    `loss` and `validation_loss` are in nats per token, unless the job has another loss, `seconds`
    is the step's wall-clock time, `mfu` a fraction of 1. None: not measured. `memory_bytes` is the
    highest peak of any rank: what torch has allocated on its GPU or for its thread, or what a
    process on CPU has resident.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    # The order of the fields is that of a line in the file.
    tokens_per_second: float | None = field(default=None, kw_only=True)
    seconds: float
    memory_bytes: int
    samples_per_second: float | None = None
    """Only for data without tokens."""
    validation_loss: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of validation.metrics, each written as a figure validation_NAME."""
    auxiliary_loss: float | None = None
    """The auxiliary loss of experts, which `loss` does not contain."""
    busiest_expert_share: float | None = None
    """The share of the tokens that the busiest expert gets, as a mean over layers."""
    busiest_rank_share: float | None = None
    """The same for the experts of the busiest rank of ep."""
    dropped_tokens: int | None = None
    """The (token, expert) pairs that experts of limited capacity dropped, summed over layers."""
    expert_counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Expert layer -> the tokens of each expert."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the data set derives from the validation loss, such as bits_per_dim or perplexity."""

    @property
    def figures(self) -> dict[str, float]:
        """Everything that was measured, by the name under which it is written."""
        values = asdict(self)
        of_metrics, measures = values.pop("validation_metrics"), values.pop("measures")
        del values["expert_counts"]
        measured = {key: value for key, value in values.items() if value is not None}
        named = {f"{VALIDATION}{name}": value for name, value in of_metrics.items()}
        return measured | measures | named


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Writes each StepRecord to {dump_folder}/metrics.jsonl, and to TensorBoard and W&B if enabled.

    The file has one JSON object per line and is flushed after each, so a killed run keeps every
    finished step. A number that is not finite is written as null, since JSON has no NaN. Metrics
    that were not measured are left out.

    The file is locked, so only one run writes to it. It has one record per step. Before the first
    record is written, records from step `first_step` on and lines that are not records are moved to
    metrics.N.jsonl, with the next free number N. A new run thus starts with an empty file, a
    resumed run continues after its checkpoint, and no record is lost. If all records of a run are
    moved, its existing files named in `pictures` move too, to NAME.N.png.

    TensorBoard files go to {dump_folder}/{save_tb_folder}/{time of start}. W&B reads its own
    WANDB_* variables and gets `job_config`. Raises ConfigError if another run is writing to the
    file.
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
    ) -> None:
        self._first_step, self._pictures = first_step, pictures
        self._has_written = False
        self._tensorboard = None
        self._wandb = None
        folder = Path(dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file: BinaryIO | None = _open_held(self.path)
        if enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            started = datetime.now().strftime("%Y%m%d-%H%M%S")
            self._tensorboard = SummaryWriter(str(folder / save_tb_folder / started))
        if enable_wandb:
            import wandb

            self._wandb = wandb.init(dir=str(folder), config=dict(job_config or {}))

    def log(self, record: StepRecord) -> str:
        """Append one record. Returns a line to print if older records were moved, otherwise ""."""
        assert self._file is not None
        moved = "" if self._has_written else self._make_way()
        self._has_written = True
        measured = record.figures
        written: dict[str, Any] = {
            key: value if math.isfinite(value) else None for key, value in measured.items()
        }
        if record.expert_counts:
            written["expert_counts"] = {k: list(v) for k, v in record.expert_counts.items()}
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
        """Move all lines but the records before `first_step`; returns a line about it, or ""."""
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
        # Replace the file atomically, and lock the new one first: a run that is killed here loses
        # no records, and no other run can lock the file in between.
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

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The records of a metrics.jsonl, given as the file or its dump folder, in the file's order.

    null is read as NaN, and unknown keys are ignored. An incomplete last line is skipped. Raises
    ConfigError if any other line is not a record, or if the file cannot be read.
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
                    raise ConfigError(f"job.dump_folder: line {number} of {path} is not a record")
    except OSError as error:
        raise ConfigError(f"job.dump_folder: {path}: {error.strerror or error}") from error
    return records


def peak_process_bytes() -> int:
    """The peak of the memory of this process that is resident on CPU."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage counts kibibytes on Linux and bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def mfu(flops_per_second: float, gpu_name: str, num_gpus: int) -> float | None:
    """Model FLOP/s utilization, as a fraction of the GPUs' peak; None for an unknown GPU.

    `flops_per_second` counts the model's operations on all GPUs, without recomputation.
    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    peak = peak_flops_per_second(gpu_name)
    return None if peak is None else flops_per_second / (peak * num_gpus)


# Peaks of dense bfloat16 matrix products, from the vendors' data sheets. The first entry whose
# words are all in the device's name counts, so variants come before the plain name.
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
    """Dense bfloat16 FLOP/s of a GPU by its CUDA device name; None if unknown.

    A MIG slice counts as unknown, because its name is that of the whole GPU.
    """
    words = set(gpu_name.upper().replace("-", " ").split())
    if "MIG" in words:
        return None
    # Whole words: L40 has no L4, H200 no H20.
    return next((peak for part, peak in _PEAK_FLOPS_PER_SECOND if words >= {*part.split()}), None)


_RECORD = TypeAdapter(StepRecord)
# Longer than any record.
_MOST_CHARACTERS = 1_000_000


def _record_of(line: bytes) -> StepRecord | None:
    """The record on a line, or None if it is not a complete record."""
    if len(line) > _MOST_CHARACTERS or not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        values = {k: math.nan if v is None else v for k, v in row.items()}
        values["validation_metrics"] = {
            name.removeprefix(VALIDATION): values[name]
            for name in values
            if name.startswith(VALIDATION) and name != "validation_loss"
        }
        values["measures"] = {
            name: value for name, value in values.items() if name.startswith(MEASURES)
        }
        record = _RECORD.validate_python(values)
    except (ValueError, AttributeError, RecursionError):
        return None
    return record if record.step >= 0 else None


def _numbered(name: str, number: int) -> str:
    """ "metrics.3.jsonl" for "metrics.jsonl"."""
    path = Path(name)
    return f"{path.stem}.{number}{path.suffix}"


def _open_held(path: Path) -> BinaryIO:
    """Open and lock the file; no other run writes to it while it is open."""
    while True:
        file = _open_to_append(path)
        try:
            if not hold(file.fileno(), PATIENCE_SECONDS):
                raise ConfigError(
                    f"job.dump_folder: another run is writing to {path.parent}; end that one, or "
                    "give another folder"
                )
            # The previous holder of the lock may have replaced the file; then open the new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open_to_append(path: Path) -> BinaryIO:
    path.touch()
    # Opening a pipe would block, so check first that it is a regular file.
    open_regular(path).close()
    return path.open("a+b")
