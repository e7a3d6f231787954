"""A tolerance that is measured: how far rounding moves each tensor of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import titanlite
from titanlite.errors import ConfigError
from titanlite.tools.verify.command import parse
from titanlite.tools.verify.differences import Key
from titanlite.tools.verify.perturbation import Perturbation
from titanlite.tools.verify.sensitivity import MARGIN, Sensitivity


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sum_gradients(model: Any, factor: float = 1.0) -> Any:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: average(one, factor))
    return model


def average(parameter: Tensor, factor: float) -> None:
    gradient = parameter.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size() / factor


def drops_a_row() -> Any:
    """The last of 16 rows of each rank has no gradient."""
    model = sum_gradients(Model())
    model.layers.register_forward_hook(
        lambda module, args, out: torch.cat([out[:-1], out[-1:].detach()])
    )
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_tells_a_fault_of_a_few_percent_from_rounding(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(32, 16, generator=generator) for _ in range(2)]
    options: dict[str, Any] = {"batches": batches, "loss": loss, "ranks": {"dp": 2}, "split": "dp"}
    options |= {"dtype": dtype, "tolerance": "sensitivity", "threads": True}
    right = titanlite.compare(Model, lambda: sum_gradients(Model()), **options).check()
    limit = right.tolerance.of(1, ("gradient", "layers.0.weight"))
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert eps / 4 < limit < 20 * eps
    for faulty in (lambda: sum_gradients(Model(), 0.9), drops_a_row):
        found = titanlite.compare(Model, faulty, **options)
        assert {failure.kind for failure in found.failures} >= {"gradient"}


def test_the_limit_is_the_change_or_the_usual_one() -> None:
    changes: list[dict[Key, float]] = [{}, {("gradient", name): size for name, size in SIZES}]
    limits = Sensitivity("bfloat16", changes)
    assert limits.of(1, ("gradient", "a")) == MARGIN * 2e-2
    # Less than half of the others': by chance.
    assert limits.of(1, ("gradient", "c")) == MARGIN * 1e-2
    assert limits.of(0, ("start", "a")) == 0.0
    assert limits.of(1, ("loss", "")) == MARGIN * 2.0**-24


SIZES = [("a", 2e-2), ("b", 1e-2), ("c", 1e-6)]


def test_weights_are_perturbed_within_half_a_spacing_until_they_are_restored() -> None:
    weight, before = torch.ones(1000), torch.ones(1000)
    perturbation = Perturbation("bfloat16", 1, 1)
    perturbation.perturb([weight])
    moved = (weight - before).abs()
    assert 0.0035 < moved.max() <= torch.finfo(torch.bfloat16).eps / 2
    perturbation.restore()
    assert weight.equal(before)
    inputs = perturbation.inputs({"tokens": torch.arange(3), "x": before})
    assert inputs["tokens"].equal(torch.arange(3))
    assert not inputs["x"].equal(before)


def test_the_option_is_a_number_or_sensitivity() -> None:
    assert parse(["job.toml", "--tolerance=1e-3"]).tolerance == 1e-3
    assert parse(["job.toml", "--tolerance", "sensitivity"]).tolerance == "sensitivity"
    for wrong in ("0", "nan", "much"):
        with pytest.raises(ConfigError, match=f"--tolerance: '{wrong}' is no positive number"):
            parse(["job.toml", f"--tolerance={wrong}"])
