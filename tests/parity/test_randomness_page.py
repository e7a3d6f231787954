"""docs/randomness.md: its DiT trains and verifies; runs with dropout start and resume alike."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pages import write_example
from torch.distributed.tensor import DTensor

from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.ranks.world import World
from titanlite.tools.verify.verify import Verifier

FSDP, TP, PP = (
    f"--parallelism.{name}_degree=2"
    for name in ("data_parallel_shard", "tensor_parallel", "pipeline_parallel")
)
SMALL = ("--training.global_batch_size=8", "--training.local_batch_size=4", "--model.dim=32")
KEYED = (
    *("--experimental.custom_import=keyed", "--model.name=keyed"),
    *("--training.dataset=photos_of_dit", "--training.loss=flow_matching"),
)
RANDOM = ("--experimental.custom_import=random_dit", "--model.name=random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the example, in a folder from which they can be imported."""
    folder = tmp_path_factory.mktemp("dit")
    write_example("dit", "randomness.md", folder)
    # The same model with dropout.
    (folder / "random_dit.py").write_text(
        "import titanlite\nfrom dit import PLAN, DiT, Sizes\nfrom torch import nn\n\n"
        "class Random(DiT):\n"
        "    def __init__(self, sizes):\n"
        "        super().__init__(sizes)\n"
        "        for block in self.blocks.values():\n"
        "            block.norm = nn.Sequential(block.norm, nn.Dropout(0.3))\n\n"
        'titanlite.register_model("random", Random, Sizes, plan=PLAN)\n'
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """So that its next import registers what a test before this one has unregistered."""
    yield
    for name in ("dit", "keyed", "random_dit"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def verifier(folder: Path) -> Iterator[Verifier]:
    """Ranks of their own: a pool that runs already would not see the folder."""
    with Verifier(timeout_seconds=120) as verifier:
        yield verifier


def config(folder: Path, *options: str) -> JobConfig:
    return parse_args([f"--job.config_file={folder / 'dit.toml'}", *SMALL, *options])


@pytest.mark.parametrize(
    "options", [(FSDP, *KEYED), pytest.param((TP, *KEYED), marks=pytest.mark.slow), (PP, *KEYED)]
)
def test_the_page_verifies_under_every_plan(
    folder: Path, verifier: Verifier, options: tuple[str, ...]
) -> None:
    found = verifier.verify(config(folder, *options), steps=2)
    assert found.agrees, found.findings


def test_verify_names_the_module_that_is_random(folder: Path, verifier: Verifier) -> None:
    with pytest.raises(ConfigError) as caught:
        verifier.verify(config(folder, FSDP, *RANDOM), steps=1)
    assert (
        "so the model is random: blocks.*.norm.* (Dropout) draws from torch's own generators; set "
        "dropout to 0 to verify, or draw what depends on the sample alone, by "
        "TokenDropout and keyed_normal of titanlite.modules (docs/randomness.md)"
    ) in str(caught.value)


def losses_of(world: World, runs: list[JobConfig]) -> list[tuple[list[float], float, str]]:
    """The losses of each run from its newest checkpoint on, its validation loss, its replicas."""
    from titanlite.checkpoint.run import Checkpoints
    from titanlite.job import build_job

    results = []
    for config in runs:
        torch.rand(3)  # what a process has drawn before
        job = build_job(resolve_job(config, world.size), world)
        with Checkpoints(job) as checkpoints:
            losses = []
            for step in range(checkpoints.first_step, config.training.steps + 1):
                losses.append(job.step(step).loss)
                checkpoints.after_step(step)
            digest = hashlib.sha256()
            for parameter in job.parameters.values():
                if not isinstance(parameter, DTensor):
                    digest.update(parameter.detach().numpy().tobytes())
            results.append((losses, job.evaluate(), digest.hexdigest()))
    return results


def test_a_run_with_dropout_resumes_to_the_bit(folder: Path, verifier: Verifier) -> None:
    """Another seed gives other losses, and so do the first steps again."""

    def run(name: str, *options: str) -> JobConfig:
        saves = (
            "--checkpoint.enable",
            "--checkpoint.interval=2",
            f"--job.dump_folder={folder}/{name}",
        )
        more = ("--training.steps=4", "--validation.steps=1")
        return config(folder, *RANDOM, *saves, *more, *options)

    runs = [
        run("a", FSDP),
        run("a", FSDP, "--checkpoint.load_step=2"),
        run("b", FSDP),
        run("c", FSDP, "--debug.seed=1"),
        run("d", TP),
    ]
    of_ranks = verifier.pool(2).call(losses_of, runs)
    for straight, resumed, again, other, _ in of_ranks:
        assert len(straight[0]) == 4
        assert resumed[0] == straight[0][2:]
        assert resumed[1] == straight[1]
        assert again == straight
        assert not set(other[0]) & set(straight[0])
    # Weights that ranks of tp replicate stay the same on both, below a dropout too.
    assert of_ranks[0][-1] == of_ranks[1][-1]


def test_the_dit_learns(folder: Path, verifier: Verifier) -> None:
    longer = config(folder, "--training.steps=30", "--validation.steps=4")
    ((losses, validation, _),) = verifier.pool(1).call(losses_of, [longer])[0]
    # An image of zeros and ones against noise of variance 1.
    assert sum(losses[:3]) / 3 > 1.4
    assert validation < 0.9 * losses[0]
