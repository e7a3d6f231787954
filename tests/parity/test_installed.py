"""Installed as a wheel in another project, titanlite trains, verifies and samples."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from pages import write_example

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def copy(folder: Path) -> None:
    """Copy what the package is built from to a new folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("titanlite", "models"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `titanlite` of a virtual environment that has the wheel of the sdist."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    copy(source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    pack = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", pack, cwd=source)
    run(*pip, "wheel", *folder.glob("*.tar.gz"), *options, "--wheel-dir", folder, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    # The dependencies are those of this environment.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "--python", environment, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    shutil.rmtree(source)
    return environment / "bin/titanlite"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Another project, with the model of docs/own_model.md and folders of the same names."""
    for name in ("models", "configs", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not titanlite')\n")
    write_example("vit", "own_model.md", tmp_path)
    (tmp_path / "smooth.py").write_text(
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def total(outputs, batch):\n"
        "    return cross_entropy(outputs, batch.targets, label_smoothing=0.1, reduction='sum')\n"
    )
    with (tmp_path / "vit.py").open("a") as file:
        file.write('titanlite.register_loss("smooth", "smooth:total")\n')
    return tmp_path


def test_an_outside_model_with_outside_data_and_loss_trains(command: Path, project: Path) -> None:
    where = "import titanlite; print(titanlite.__file__)"
    python = command.with_name("python")
    assert str(command.parents[1]) in run(python, "-c", where, cwd=project)
    metadata = "from importlib.metadata import version; print('titanlite', version('titanlite'))"
    assert run(command, "--version", cwd=project) == run(python, "-c", metadata, cwd=project)
    assert list(command.parents[1].glob("lib/*/site-packages/titanlite/py.typed"))
    fixtures = run(python, "-m", "pytest", "--fixtures", "vit.py", cwd=project)
    assert {"assert_equivalent", "verify_job"} <= set(fixtures.split())
    said = run(
        command,
        *("train", "vit.toml", "--training.steps=2", "--training.loss=smooth"),
        *("--parallelism.data_parallel_shard_degree=2", "--lr_scheduler.warmup_steps=1"),
        cwd=project,
    )
    assert "vit, flavor default: 202,186 parameters" in said
    assert re.search(r"step 2/2 +loss 2\.\d+", said)


@pytest.mark.slow
def test_other_commands_run(command: Path, project: Path) -> None:
    (project / "job.toml").write_text(
        "[model]\nflavor = 'debug'\n"
        "[training]\ndataset = 'digits'\nglobal_batch_size = 16\nsteps = 1\n"
        "[lr_scheduler]\nwarmup_steps = 1\n"
        "[sampling]\nnum_samples = 1\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "titanlite", "train")
    options = ("--checkpoint.enable", "--parallelism.data_parallel_shard_degree=2")
    run(command.with_name("python"), *torchrun, "job.toml", *options, cwd=project)
    run(command, "sample", "outputs/checkpoint", "--out=one.png", "--num-samples=1", cwd=project)
    assert (project / "one.png").stat().st_size > 0
    run(command, "verify", "job.toml", "--steps", "1", cwd=project)
    assert "makespan" in run(command, "simulate", "1F1B", "--quiet", cwd=project)
    assert "collectives" in run(command, "lab", cwd=project)


def test_where_links_are_text_files_the_package_is_the_same(tmp_path: Path) -> None:
    copy(tmp_path)
    show = "lambda packages, package_dir: print(sorted(packages))"
    packages = f"import setuptools; setuptools.setup = {show}; import setup"
    expected = run(sys.executable, "-c", packages, cwd=tmp_path)
    link = tmp_path / "titanlite/models"
    link.unlink()
    link.write_text("../models")
    assert run(sys.executable, "-c", packages, cwd=tmp_path) == expected
    where = "import titanlite.models.hf.config as module; print(module.__file__)"
    found = run(sys.executable, "-c", where, cwd=tmp_path)
    assert found.strip() == str(tmp_path / "models/hf/config.py")
