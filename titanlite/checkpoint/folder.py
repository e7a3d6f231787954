"""A folder of checkpoints step-N, each of them complete or absent; torch-free.

A checkpoint is written under a temporary name, and renamed when all of it is on the disk. A killed
run leaves only folders with temporary names, and `clean` removes them.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint.manifest import MANIFEST, BrokenCheckpointError, Manifest, read_manifest
from titanlite.errors import ConfigError
from titanlite.files import flush, hold

STEP = re.compile(r"step-(0|[1-9]\d*)")
# A temporary name: being written, replaced by another checkpoint, or being removed; then a token.
LEFTOVER = re.compile(r"(step-\d+)\.(new|replaced|removed)-[0-9a-f]{8}")
# How long the ranks of a killed run may take to end and release the folder.
PATIENCE_SECONDS = 10.0


def make_token() -> str:
    """A random token for the temporary names of one run."""
    return secrets.token_hex(4)


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder; `manifest` is None if it cannot be used, because of `reason`."""

    path: Path
    step: int
    manifest: Manifest | None
    reason: str = ""


class CheckpointFolder:
    """The checkpoints in the folder `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def unfinished(self, step: int, token: str) -> Path:
        """The temporary path of the checkpoint of `step`; `token` is the run's."""
        return self.path / f"step-{step}.new-{token}"

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, this folder is locked: another run would remove our unfinished checkpoints.

        Raises ConfigError if another run has the lock. A file system without locks excludes nobody.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if not hold(descriptor, PATIENCE_SECONDS):
                raise ConfigError(
                    f"checkpoint.folder: another run is using {self.path}; end that run, or "
                    "give another folder"
                )
            yield
        finally:
            os.close(descriptor)

    def newest_first(self) -> list[Found]:
        """All checkpoints, the last written first; those without a valid manifest by step."""
        found = [look_at(path) for path in self._entries() if STEP.fullmatch(path.name)]
        # A broken one has no serial: it is placed right after the last one of a lower step.
        whole = [(one.manifest.serial, one) for one in found if one.manifest]
        ordered = [one for _, one in sorted(whole, key=lambda pair: pair[0])]
        for broken in sorted((one for one in found if not one.manifest), key=lambda one: one.step):
            before = [index for index, one in enumerate(ordered) if one.step < broken.step]
            ordered.insert(max(before, default=-1) + 1, broken)
        return ordered[::-1]

    def has_any(self) -> bool:
        """Whether there is a checkpoint, valid or not."""
        return any(STEP.fullmatch(path.name) for path in self._entries())

    def next_serial(self) -> int:
        """A serial larger than that of every checkpoint in the folder."""
        serials = [one.manifest.serial for one in self.newest_first() if one.manifest]
        return max(serials, default=0) + 1

    def commit(self, unfinished: Path, final: Path, manifest: Manifest, token: str) -> None:
        """Write the manifest of a checkpoint whose files are all on the disk, and rename it."""
        path = unfinished / MANIFEST
        path.write_text(manifest.to_json(), encoding="utf-8")
        flush(path)
        flush(unfinished)
        replaced = final.with_name(f"{final.name}.replaced-{token}")
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        flush(self.path)
        if replaced.exists():
            remove(replaced)

    def in_the_way(self) -> Path | None:
        """A path that has a checkpoint's name but is not a folder; None if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            named = sorted(path for path in self.path.iterdir() if STEP.fullmatch(path.name))
            return next((path for path in named if not path.is_dir()), None)
        return None

    def keep_latest(self, count: int, token: str) -> list[Path]:
        """Remove all but the last `count` valid checkpoints (0: keep all); returns the removed.

        The last one with the full training state stays, even if `count` newer ones hold only
        weights. Broken checkpoints do not count, and are not removed.
        """
        good = [one for one in self.newest_first() if one.manifest]
        training = (one for one in good if one.manifest and one.manifest.holds == "training")
        last = next(training, None)
        surplus = [one.path for one in good[count:] if one is not last] if count else []
        for path in surplus:
            # Renamed first, so that no partly removed checkpoint is ever found.
            doomed = path.with_name(f"{path.name}.removed-{token}")
            path.rename(doomed)
            remove(doomed)
        return surplus

    def clean(self) -> list[Path]:
        """Remove what a killed run left; restore a checkpoint that it was about to replace."""
        removed = []
        for path in self._entries():
            match = LEFTOVER.fullmatch(path.name)
            if match is None:
                continue
            name, kind = match.groups()
            if kind == "replaced" and not path.with_name(name).exists():
                path.rename(path.with_name(name))
            else:
                remove(path)
                removed.append(path)
        return removed

    def _entries(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(path for path in self.path.iterdir() if path.is_dir())
        return []


def look_at(path: Path) -> Found:
    """The checkpoint in the folder `path`; reads only its manifest."""
    match = STEP.fullmatch(path.name)
    named = int(match.group(1)) if match else None
    try:
        manifest = read_manifest(path)
        if named not in (None, manifest.step):
            raise BrokenCheckpointError(f"{MANIFEST} has step {manifest.step}")
    except BrokenCheckpointError as error:
        return Found(path, named or 0, None, str(error))
    return Found(path, manifest.step, manifest)


def remove(path: Path) -> None:
    """Remove a folder and its content; of a link to a folder, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
