"""Register a model, data set or loss of your own, so that a job can name it. No torch.

    titanlite.register_model("vit", "vit.model:ViT", "vit.sizes:Sizes", plan="vit.plan:PLAN")

Call these functions from a module that `experimental.custom_import` names, or from Python before
`titanlite.train(...)`. "module:attribute" is imported when it is first needed; an object works too,
but then the registering module has to import what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.data import catalog
from titanlite.data.spec import Dataset, DatasetSpec
from titanlite.models import ModelSpec, load, register


def register_model(
    name: str,
    build: str | Callable[[Any], Any],
    config: str | type,
    *,
    plan: str | Any = None,
    flavors: str | Mapping[str, Any] | None = None,
    init: str | Callable[[Any], None] | None = None,
    inputs: str | Mapping[str, str] | Callable[[Any], Mapping[str, Any]] | None = None,
    output: str | Callable[[Any], Any] | None = None,
) -> None:
    """Register a model as `name`; titanlite/models/__init__.py explains the arguments.

    Raises ValueError if a different model has that name.
    """
    register(ModelSpec(name, config, build, plan, flavors, init, inputs, output))


def register_dataset(name: str, build: str | Callable[..., Dataset], **details: Any) -> None:
    """Register a data set as `name`; `details` are further fields of DatasetSpec.

    `build(model=..., seq_len=..., split=..., seed=..., path=..., path_key=...)` returns a Dataset.
    Raises ValueError if a different data set has that name.
    """
    details.setdefault("description", name)
    catalog.register(DatasetSpec(name=name, build=build, **details))


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: functions, or "module:attribute" of each."""

    name: str
    total: str | Callable[..., Any]
    count: str | Callable[..., Any] | None

    def load(self) -> Any:
        """The Loss; imports torch."""
        from titanlite.batch import Batch
        from titanlite.training.loss import Loss

        return Loss(load(self.total), load(self.count) or Batch.count_targets)


LOSSES: dict[str, LossSpec] = {}
"""The registered losses, which training.loss can name."""


def register_loss(
    name: str, total: str | Callable[..., Any], count: str | Callable[..., Any] | None = None
) -> None:
    """Register a loss, for `training.loss = "name"`.

    `total(outputs, batch)` is the sum of the losses of a batch, a scalar tensor, and `count(batch)`
    is the number of its terms, by default the targets that are not -100. The step divides by the
    count of the whole global batch, so microbatches and ranks may have different counts. Raises
    ValueError if a different loss has that name.
    """
    spec = LossSpec(name, total, count)
    if LOSSES.setdefault(name, spec) != spec:
        raise ValueError(f"a different loss named {name!r} is already registered")
