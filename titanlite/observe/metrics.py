"""The figures of a run, one record a step: metrics.jsonl always, TensorBoard and W&B where asked.

Also the few measures that turn into figures here: peak memory, bits per dimension, and model
FLOP/s utilization against what a known GPU can do.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from titanlite.errors import ConfigError

FILE_NAME = "metrics.jsonl"


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
    taken are left out. Lines of steps from `first_step` on are dropped from a file already there,
    so that a new run starts clean and a resumed one goes on where its checkpoint was.
    TensorBoard files go to {dump_folder}/{save_tb_folder}/{time of start}; W&B reads its own
    WANDB_* variables and gets `job_config`. With `enabled` False (every rank but the first)
    nothing is written. Raises ConfigError where a writer's package is missing.
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
        enabled: bool = True,
    ) -> None:
        self._file = None
        self._tensorboard = None
        self._wandb = None
        if not enabled:
            return
        check_extras(enable_tensorboard=enable_tensorboard, enable_wandb=enable_wandb)
        folder = Path(dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        _drop_steps_from(self.path, first_step)
        self._file = self.path.open("a", encoding="ascii")
        if enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            started = datetime.now().strftime("%Y%m%d-%H%M%S")
            self._tensorboard = SummaryWriter(str(folder / save_tb_folder / started))
        if enable_wandb:
            import wandb

            self._wandb = wandb.init(dir=str(folder), config=dict(job_config or {}))

    def log(self, record: StepRecord) -> None:
        """Append one step."""
        if self._file is None:
            return
        measured = {key: value for key, value in asdict(record).items() if value is not None}
        written = {key: value if math.isfinite(value) else None for key, value in measured.items()}
        self._file.write(json.dumps(written, allow_nan=False) + "\n")
        self._file.flush()
        figures = {key: value for key, value in measured.items() if key != "step"}
        if self._tensorboard is not None:
            for key, value in figures.items():
                self._tensorboard.add_scalar(key, value, record.step)
        if self._wandb is not None:
            self._wandb.log(figures, step=record.step)

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
    short is left out.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    known = {field.name for field in fields(StepRecord)}
    records = []
    for row in _rows(path):
        figures: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items()}
        records.append(StepRecord(**{k: v for k, v in figures.items() if k in known}))
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
    """A loss in nats a token as bits a pixel channel, the measure of image likelihood papers."""
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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="ascii").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise


def _drop_steps_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [row for row in _rows(path) if row["step"] < first_step]
    # Replaced in one go: a run killed here keeps its past.
    shorter = path.with_name(f"{path.name}.new")
    shorter.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="ascii")
    shorter.replace(path)
