"""`titanlite.verify`: does a job's plan compute what one process computes?

result = titanlite.verify("configs/tp2_fsdp2.toml", shrink=True)
assert result.agrees, result
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config import JobConfig
from titanlite.config.load import read_any
from titanlite.start import check_start
from titanlite.tools.verify.jobs import DEFAULT_STEPS
from titanlite.tools.verify.report import format_header, format_verification, to_json
from titanlite.tools.verify.result import Verification
from titanlite.tools.verify.shrink import read_small
from titanlite.tools.verify.verify import Verifier


@dataclass(frozen=True)
class VerifyResult:
    """The result of `titanlite.verify`; `print` shows what the command shows."""

    found: Verification
    """The differences of each step, the tolerances and the failures."""
    source: str = ""
    shrunk: tuple[str, ...] = ()
    """What `shrink` has changed, in words."""

    @property
    def agrees(self) -> bool:
        return self.found.agrees

    @property
    def cause(self) -> str:
        """The most likely cause of the differences; empty if there are none."""
        return self.found.cause

    @property
    def figures(self) -> dict[str, Any]:
        """Everything that was found, as `titanlite verify --json` writes it."""
        return to_json(self.found, self.found.ran(self.source, self.shrunk))

    def check(self) -> "VerifyResult":
        """Raises AssertionError, with what `print` shows, unless the plan agrees."""
        if not self.agrees:
            raise AssertionError(f"\n{self}")
        return self

    def __str__(self) -> str:
        header = format_header(self.found, self.source, list(self.shrunk))
        lines = [format_verification(self.found, header)]
        if self.found.error is not None and self.found.error.rank_traceback:
            lines += ["", self.found.error.rank_traceback]
        return "\n".join(lines)


def verify(
    job: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    steps: int = DEFAULT_STEPS,
    dtype: str = "float64",
    shrink: bool = False,
    replay_routing: bool = False,
    threads: bool | None = None,
    timeout_seconds: float = 300,
) -> VerifyResult:
    """Train a job under its plan and on one process, and compare every step, as `titanlite verify`.

    `job` is what `train` takes; `changes` maps keys of it ("parallelism.tensor_parallel_degree") to
    other values. `shrink` makes layers, widths, sequence and batch as small as the plan allows.
    `dtype` is "float64", "float32" or "bfloat16". With `replay_routing`, every token goes to the
    experts of the one process. `threads` is that of `compare`.

    Raises ConfigError with all mistakes of the job, and TitanliteError if it does not run on one
    process; an exception of a rank is part of the result.
    """

    def read(more: Mapping[str, Any]) -> Any:
        return read_any(job, {**(changes or {}), **more})

    reading, shrunk = read_small(read) if shrink else (read({}), [])
    start = check_start(reading, threads=threads)
    config = start.job.config
    with Verifier(
        start.device_type,
        timeout_seconds=timeout_seconds,
        max_ranks=config.job.max_local_ranks,
        threads=start.threads,
    ) as verifier:
        found = verifier.verify(
            start.job, steps=steps, reloads=True, dtype=dtype, replay=replay_routing
        )
    source = str(job) if isinstance(job, (str, Path)) else config.job.config_file or ""
    return VerifyResult(found, source, tuple(shrunk))
