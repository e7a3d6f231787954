"""Temporary files, by which the ranks of a machine meet and give each other tensors."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.errors import ConfigError


@contextlib.contextmanager
def failed_writes() -> Iterator[None]:
    """Raise the OSError of a write by torch.save, which ends its archive with another error."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a temporary file is written; raises ConfigError if that fails."""
    try:
        with failed_writes():
            yield
    except (OSError, dist.DistStoreError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"environment: {path} cannot be written: {why}; free space there, or set another TMPDIR"
        ) from error


def save_temporary(values: object, path: Path) -> None:
    """torch.save for a temporary file; raises ConfigError if it cannot be written."""
    with writing(path), path.open("wb") as file:
        torch.save(values, file)
