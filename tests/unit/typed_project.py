"""A user's project with types, which `make check` reads as strictly as its user would."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import titanlite
from titanlite import ConfigError, ParallelPlan, apply_ac, apply_fsdp, apply_tp
from titanlite.callbacks import Event
from titanlite.tools.verify import Comparison


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


PLAN = ParallelPlan({"0": ColwiseParallel(), "2": RowwiseParallel()}, blocks="")


def parallel(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    apply_tp(model, mesh["tp"], PLAN)
    apply_ac(model, "full", plan=PLAN)
    titanlite.apply_compile(model, plan=PLAN)
    apply_fsdp(model, mesh["dp"], plan=PLAN)
    return model


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch)).sum()


def compare(batches: list[Tensor]) -> Comparison:
    degrees = {"tp": 2, "dp": 2}
    found = titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks=degrees)
    cause: str = found.cause
    print(found.agrees, cause, found.margin, titanlite.__version__)
    return found.check()


def test_parallel(assert_equivalent: Callable[..., Comparison]) -> None:
    assert_equivalent(Model, parallel, batches=[torch.ones(4, 8)], loss=loss, ranks=2)


def show(event: Event) -> None:
    print(event.step, event.validation_loss)


def train(config: Mapping[str, Mapping[str, Any]]) -> float:
    titanlite.register_model("mine", "project:Model", "project:Sizes", plan=PLAN)
    titanlite.register_dataset("mine", "project:build", has_tokens=True)
    titanlite.register_loss("mine", "project:total")
    titanlite.register_metric("mine", "project:metric")
    try:
        return titanlite.train(config, threads=True, on_step=show).losses[-1]
    except ConfigError as error:
        raise SystemExit("\n".join(error.problems)) from error
