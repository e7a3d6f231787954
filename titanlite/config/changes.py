"""Find the keys that changed between a checkpoint's job and this one; torch-free."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from titanlite.config.keys import job_keys
from titanlite.config.model import make_model_config
from titanlite.config.schema import JobConfig
from titanlite.config.toml import show
from titanlite.errors import ConfigError

# The sections that decide which numbers are computed. The others decide where, and what is shown.
SECTIONS = ("training", "optimizer", "lr_scheduler", "debug")
# Keys of those sections that belong to the plan.
PLAN = ("training.local_batch_size", "training.enable_cpu_offload", "training.gc_freq")


def changed_keys(saved: Mapping[str, Any], config: JobConfig) -> list[str]:
    """The changed keys, each as "training.steps 40 -> 80".

    `saved` is the checkpoint's configuration as plain values.
    """
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
    same_warmup = before.lr_scheduler.warmup_steps == config.lr_scheduler.warmup_steps
    if same_warmup and before.warmup_steps != config.warmup_steps:
        # A run shorter than its warm-up cuts it; a longer one does not.
        changes.append(f"the warm-up {before.warmup_steps} -> {config.warmup_steps} steps")
    return changes


def changed_sizes(saved: Mapping[str, Any], config: JobConfig) -> list[str]:
    """The changed fields of the model's configuration, each as "model.num_heads 8 -> 2".

    Empty if `saved` is empty or cannot be read, as when another version wrote it.
    """
    if not saved:
        return []
    # Without [experimental], no module that the checkpoint names is imported.
    values = {section: keys for section, keys in saved.items() if section != "experimental"}
    try:
        before = dataclasses.asdict(make_model_config(JobConfig.model_validate(values)))
    except (ValidationError, ConfigError):
        return []
    now = dataclasses.asdict(make_model_config(config))
    return [
        f"model.{name} {show(before[name])} -> {show(value)}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
