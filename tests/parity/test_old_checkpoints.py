"""Checkpoints from before every tensor had an account load, or are refused with one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_tensor_account import config
from training import PP

from titanlite.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, resolve_job
from titanlite.errors import ConfigError
from titanlite.job import build_job
from titanlite.ranks.world import World
from titanlite.tools.verify.verify import Verifier


def save(world: World, job_config: JobConfig) -> None:
    job = build_job(resolve_job(job_config, world.size), world)
    job.step()
    with Checkpoints(job) as checkpoints:
        checkpoints.save(1)


def load(world: World, job_config: JobConfig) -> int:
    with Checkpoints(build_job(resolve_job(job_config, world.size), world)) as checkpoints:
        return checkpoints.first_step


def age(folder: Path, **changes: Any) -> None:
    """Make a checkpoint one of an earlier titanlite, whose manifest lacks a field."""
    manifest = read_manifest(folder)
    assert manifest.is_accounted
    values = {**manifest.model_dump(), "is_accounted": False, **changes}
    text = json.loads(Manifest.model_validate(values).to_json())
    (folder / MANIFEST).write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("model", "plan", "line"),
    [
        ("covered", {}, ""),
        ("covered", PP, ""),
        ("scaled", {}, "which left out `module` in names and saved layers.0.adapter.module.weight"),
        ("unused", {}, ""),
        ("unused", PP, "may not have saved the trained value of spare, a parameter that no stage"),
    ],
)
def test_an_old_checkpoint(
    verifier: Verifier, tmp_path: Path, model: str, plan: dict[str, Any], line: str
) -> None:
    more = {"checkpoint": {"enable": True}, "job": {"dump_folder": str(tmp_path)}}
    job_config, pool = config(model, plan, **more), verifier.pool(2 if plan else 1)
    pool.call(save, job_config)
    age(tmp_path / "checkpoint/step-1")
    if not line:
        assert set(pool.call(load, job_config)) == {2}
        return
    with pytest.raises(ConfigError) as caught:
        pool.call(load, job_config)
    assert line in str(caught.value)
