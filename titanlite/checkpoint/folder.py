"""A folder of checkpoints: step-N each, which is there wholly or not at all; torch-free.

A checkpoint is written under another name and gets its own by a rename, after all of it has reached
the disk. What a killed run leaves behind has a name of the other kind, and `clean` removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpointError,
    Manifest,
    read_manifest,
)
from titanlite.errors import ConfigError
from titanlite.files import hold

STEP = re.compile(r"step-(0|[1-9]\d*)")
# Being written; set aside while another takes its name; being removed. After it, make_token's.
LEFTOVER = re.compile(r"(step-\d+)\.(new|replaced|removed)-[0-9a-f]{8}")
# The ranks of a run that was killed may take so long to end, and let go of the folder.
PATIENCE_SECONDS = 10.0


def make_token() -> str:
    """What tells the unfinished things of one run from all others."""
    return secrets.token_hex(4)


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder; `manifest` is None where it cannot be used, for `reason`."""

    path: Path
    step: int
    manifest: Manifest | None
    reason: str = ""


class CheckpointFolder:
    """The checkpoints below `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.path / f"step-{step}"

    def unfinished(self, step: int, token: str) -> Path:
        """Where the checkpoint of `step` is written; `token` is the run's own."""
        return self.path / f"step-{step}.new-{token}"

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, no other run holds this folder, whose unfinished checkpoints would be removed.

        Raises ConfigError where one does. A file system without locks keeps nobody out.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if not hold(descriptor, PATIENCE_SECONDS):
                raise ConfigError(
                    f"checkpoint.folder: another run is using {self.path}; end that one, or "
                    "give another folder"
                )
            yield
        finally:
            os.close(descriptor)

    def newest_first(self) -> list[Found]:
        """All checkpoints, the last written first; those without a good manifest by their step."""
        found = [look_at(path) for path in self._entries() if STEP.fullmatch(path.name)]
        # A broken one has no serial: it stands before the good one whose step comes next.
        ordered: list[Found] = sorted((one for one in found if one.manifest), key=_serial)
        for broken in sorted((one for one in found if not one.manifest), key=lambda one: one.step):
            before = [index for index, one in enumerate(ordered) if one.step < broken.step]
            ordered.insert(max(before, default=-1) + 1, broken)
        return ordered[::-1]

    def has_any(self) -> bool:
        """Whether there is a checkpoint here, good or not."""
        return any(STEP.fullmatch(path.name) for path in self._entries())

    def next_serial(self) -> int:
        """A serial larger than that of any checkpoint here."""
        serials = [one.manifest.serial for one in self.newest_first() if one.manifest]
        return max(serials, default=0) + 1

    def commit(self, unfinished: Path, final: Path, manifest: Manifest, token: str) -> None:
        """Give a checkpoint whose files are all on the disk its manifest and its name."""
        path = unfinished / MANIFEST
        with path.open("w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        flush_folder(unfinished)
        if final.exists():
            replaced = final.with_name(f"{final.name}.replaced-{token}")
            final.rename(replaced)
            unfinished.rename(final)
            flush_folder(self.path)
            remove(replaced)
        else:
            unfinished.rename(final)
            flush_folder(self.path)

    def in_the_way(self) -> Path | None:
        """Something that has a checkpoint's name and is no folder, where there is such a thing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            named = sorted(path for path in self.path.iterdir() if STEP.fullmatch(path.name))
            return next((path for path in named if not path.is_dir()), None)
        return None

    def keep_latest(self, count: int, token: str) -> list[Path]:
        """Remove all but the last `count` good checkpoints (0: none); what was removed.

        The last one that a run can go on from stays too, where newer ones hold weights alone.
        Broken ones are no good to keep, and not ours to remove.
        """
        good = [one for one in self.newest_first() if one.manifest]
        last = next(
            (one for one in good if one.manifest and one.manifest.holds == "training"), None
        )
        surplus = [one.path for one in good[count:] if one is not last] if count else []
        for path in surplus:
            # From here on it is not a checkpoint any more, so that it is never half of one.
            doomed = path.with_name(f"{path.name}.removed-{token}")
            path.rename(doomed)
            remove(doomed)
        return surplus

    def clean(self) -> list[Path]:
        """Remove what a killed run has left; put back what it had only set aside."""
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


def _serial(found: Found) -> int:
    return found.manifest.serial if found.manifest else 0


def look_at(path: Path) -> Found:
    """The checkpoint in the folder `path`, by its manifest alone."""
    match = STEP.fullmatch(path.name)
    named = int(match.group(1)) if match else None
    try:
        manifest = read_manifest(path)
        if named not in (None, manifest.step):
            raise BrokenCheckpointError(f"{MANIFEST} is of step {manifest.step}")
    except BrokenCheckpointError as error:
        return Found(path, named or 0, None, str(error))
    return Found(path, manifest.step, manifest)


def find_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint at `path`, or the newest with a good manifest in the folder that it is.

    Raises ConfigError where there is none.
    """
    found = look_at(path)
    if found.manifest is None and not (path / MANIFEST).exists():
        newest = [one for one in CheckpointFolder(path).newest_first() if one.manifest]
        if not newest:
            raise ConfigError(f"{path} is no checkpoint, nor a folder of them; give step-N of one")
        found = newest[0]
    if found.manifest is None:
        raise ConfigError(f"{path} is refused: {found.reason}; give another checkpoint")
    return found.path, found.manifest


def remove(path: Path) -> None:
    """Remove a folder with all that is in it; of a link to one, the link alone."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def flush_folder(path: Path) -> None:
    """Have the names in a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
