"""What somebody adds who has read docs/architecture.md alone: each is a patch of few files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def patched_copy(folder: Path, patch: str) -> list[str]:
    """Copy the library to `folder` and apply a patch of this folder; the files that it changes."""
    for name in ("titanlite", "models", "configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    path = str(HERE / patch)
    subprocess.run(["git", "apply", path], cwd=folder, check=True)
    listed = subprocess.run(
        ["git", "apply", "--numstat", path], cwd=folder, check=True, capture_output=True, text=True
    )
    return sorted(line.split("\t")[2] for line in listed.stdout.splitlines())


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    """What `titanlite ...` prints in a copy; fails if it ends with another exit status."""
    result = subprocess.run(
        [sys.executable, "-m", "titanlite", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def with_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    changed = patched_copy(folder, "int8.patch")
    new = [f"titanlite/parallelize/int8/{n}.py" for n in ("__init__", "apply", "spec", "step")]
    assert changed == sorted([*new, "titanlite/parallelize/steps.py"])
    return folder


INT8 = "--model.converters=quantize.linear.int8"


def test_a_step_is_one_folder_and_one_line(with_int8: Path) -> None:
    """With its keys, its place in the order, and the proof that every plan computes the same."""
    verified = run(with_int8, "verify", "configs/tp2_fsdp2.toml", INT8, "--steps=1")
    assert "AGREES" in verified
    assert "filter_fqns" in run(with_int8, "train", "--help", "quantize.linear.int8")


def test_the_step_does_something(with_int8: Path, tmp_path: Path) -> None:
    plain = [
        *("train", "configs/tp2_fsdp2.toml", "--training.steps=1", "--validation.enable=false"),
        *("--parallelism.tensor_parallel_degree=1", "--parallelism.data_parallel_shard_degree=1"),
        *(f"--job.dump_folder={tmp_path}", "--sampling.num_samples=0"),
    ]
    without, converted = run(with_int8, *plain), run(with_int8, *plain, INT8)
    norms = [re.findall(r"  norm ([\d.]+)", output) for output in (without, converted)]
    assert len(norms[0]) == len(norms[1]) > 0
    assert norms[0] != norms[1]
    assert re.search(r"int8 weights +on", converted), converted


def test_a_mistake_is_one_line(with_int8: Path) -> None:
    without_layers = "--quantize.linear.int8.filter_fqns=layers,output,embeddings,head"
    printed = run(with_int8, "train", "configs/tp2_fsdp2.toml", INT8, without_layers, status=2)
    (said,) = [line for line in printed.splitlines() if not line.endswith(" ...")]
    assert said.startswith("model.converters: no linear layer of ")


def test_a_mesh_axis_is_a_row_and_a_key(tmp_path: Path) -> None:
    """With the data, the loss, the weights and `verify` that follow from the row."""
    assert patched_copy(tmp_path, "axis.patch") == [
        "titanlite/mesh/parallel_dims.py",
        "titanlite/parallelize/fsdp/spec.py",
    ]
    plan = [f"--parallelism.data_parallel_{n}_degree=2" for n in ("region", "replicate")]
    plan += [f"--parallelism.{n}_degree=1" for n in ("tensor_parallel", "data_parallel_shard")]
    file, local = "configs/tp2_fsdp2.toml", "--training.local_batch_size=16"
    verified = run(tmp_path, "verify", file, local, *plan, "--steps=1")
    assert "dp_region 2 x dp_replicate 2, 4 ranks" in verified
    assert "AGREES" in verified


def test_a_model_family_is_a_folder_a_registration_and_a_job(tmp_path: Path) -> None:
    new = [f"models/qwen2/{n}.py" for n in ("__init__", "config", "model", "plan")]
    changed = patched_copy(tmp_path, "qwen2.patch")
    assert changed == sorted(["configs/tp2_qwen2.toml", "models/__init__.py", *new])
    verified = run(tmp_path, "verify", "configs/tp2_qwen2.toml", "--steps=1")
    assert "tp 2, 2 ranks" in verified
    assert "AGREES" in verified
