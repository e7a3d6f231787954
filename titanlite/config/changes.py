"""Which keys a job has changed since its checkpoint was saved; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titanlite.config.keys import job_keys
from titanlite.config.schema import JobConfig
from titanlite.config.toml import show

# What decides which numbers are computed; the other sections decide where, and what is shown.
SECTIONS = ("training", "optimizer", "lr_scheduler", "debug")
# Part of the plan: a global batch is cut into such.
PLAN = ("training.local_batch_size", "training.enable_cpu_offload", "training.gc_freq")


def changed_keys(saved: Mapping[str, Any], config: JobConfig) -> list[str]:
    """ "training.steps 40 -> 80" for each such key; `saved` is a configuration as plain values."""
    try:
        before = JobConfig.model_validate(saved)
    except ValidationError:  # of another version of titanlite
        return ["keys that this version does not have"]
    changes = []
    for name, key in job_keys().items():
        if key.section in SECTIONS and name not in PLAN:
            old, new = (getattr(getattr(c, key.section), key.leaf) for c in (before, config))
            if old != new:
                changes.append(f"{name} {show(old)} -> {show(new)}")
    return changes
