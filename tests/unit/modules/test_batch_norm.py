"""Runs of a model with batch norms: their statistics under recomputation and in pipelines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import titanlite
from titanlite.callbacks import Event
from titanlite.errors import ConfigError
from titanlite.parallelize import ParallelPlan


@dataclass(frozen=True)
class Sizes:
    dim: int = 8


class Block(nn.Module):
    """A bias before the norm would have rounding errors as gradients."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


class Net(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Linear(4, sizes.dim)
        self.blocks = nn.ModuleDict({str(i): Block(sizes.dim) for i in range(4)})
        self.head = nn.Linear(sizes.dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Points:
    def __init__(self, **_: Any) -> None:
        self.num_samples = 32

    def sample(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index % 32))
        return {"x": x, "targets": (x.sum() > 0).long()}


@pytest.fixture(autouse=True)
def _registered() -> None:
    plan = ParallelPlan(blocks="blocks", embeddings=("embed",), head=("head",), sequence_dim=None)
    titanlite.register_model("net", Net, Sizes, plan=plan)
    fields = {"x": None, "targets": None}
    titanlite.register_dataset("points", Points, has_tokens=False, fields=fields)


def train(
    folder: Path, microbatch: int, recomputes: str, **parallelism: Any
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """The validation losses of a job, and the buffers of the whole model at its end."""

    def save(event: Event) -> None:
        torch.save(event.job.buffers, folder / f"{event.job.world.rank}.pt")

    if parallelism:
        parallelism["pipeline_parallel_microbatch_size"] = microbatch
    job = {
        "job": {"dump_folder": str(folder)},
        "model": {"name": "net"},
        "training": {
            "dataset": "points",
            "dtype": "float64",
            "global_batch_size": 8,
            "local_batch_size": 8 if parallelism else microbatch,
            "steps": 4,
        },
        "validation": {"enable": True, "freq": 2, "local_batch_size": 8},
        "optimizer": {"lr": 0.05},
        "lr_scheduler": {"warmup_steps": 0},
        "activation_checkpoint": {"mode": recomputes} if recomputes else {},
        "parallelism": {"data_parallel_shard_degree": 1, **parallelism},
        "sampling": {"num_samples": 0},
    }
    found = titanlite.train(job, on_end=save).validation_losses
    of_ranks = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    return found, {name: tensor for buffers in of_ranks for name, tensor in buffers.items()}


@pytest.mark.parametrize("recomputes", ["", "full"], ids=["default", "full"])
def test_recomputation_changes_no_statistics(tmp_path: Path, recomputes: str) -> None:
    expected, kept = train(tmp_path, 4, "none")
    found, buffers = train(tmp_path, 4, recomputes)
    assert found == expected
    assert buffers.keys() == kept.keys()
    assert all(torch.equal(buffers[name], kept[name]) for name in kept)
    assert kept["blocks.1.norm.num_batches_tracked"] == 8


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_has_the_statistics_of_its_microbatches(tmp_path: Path, schedule: str) -> None:
    """As one process that accumulates over batches of that size."""
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
    expected, kept = train(tmp_path / "one", 4, "none")
    plan = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    found, buffers = train(tmp_path / "two", 4, "full", **plan)
    assert found == pytest.approx(expected, rel=1e-10)
    assert buffers.keys() == kept.keys()
    assert all(torch.allclose(buffers[name], kept[name], rtol=1e-10, atol=1e-12) for name in kept)


def test_one_sample_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, 1, "")
    key, _, said = str(caught.value).partition(": ")
    assert key == "training.local_batch_size"
    assert said.startswith("1 gives a batch norm one value per channel, which has no variance (")
    assert said.endswith(": return x + self.down(self.norm(self.up(x)).relu())); give 2 or more")
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, 1, "", pipeline_parallel_degree=2)
    assert str(caught.value) == f"parallelism.pipeline_parallel_microbatch_size: {said}"
