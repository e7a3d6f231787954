"""Register a model, data set, loss, ... of your own, so that a job can name it. No torch.

    titanlite.register_model("vit", "vit.model:ViT", "vit.sizes:Sizes", plan="vit.plan:PLAN")

Call these functions from a module that `experimental.custom_import` names, or from Python before
`titanlite.train(...)`. "module:attribute" is imported when it is first needed; an object works too,
but then the registering module has to import what it is made of.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import titanlite.data.catalog
import titanlite.models  # noqa: F401 (what is built in is registered first)
from titanlite.data.spec import WEIGHTED, Dataset, DatasetSpec
from titanlite.models.spec import ModelSpec
from titanlite.registry import (
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OPTIMIZERS,
    SCHEDULERS,
    FunctionSpec,
    LossSpec,
)


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
    hf: Any = None,
) -> None:
    """Register a model as `name`; models/spec.py explains the arguments.

    Raises ValueError if a different model has that name.
    """
    MODELS.add(ModelSpec(name, config, build, plan, flavors, init, inputs, output, hf))


def register_dataset(name: str, build: str | Callable[..., Dataset], **details: Any) -> None:
    """Register a data set as `name`.

    `build(model=..., seq_len=..., split=..., seed=..., path=..., path_key=...)` returns a Dataset
    of samples of `seq_len` tokens, for a model with configuration `model`. `split` is "train" or
    "validation". `path` is the folder of its files, and `path_key` the key that set it, which the
    ConfigError for missing or damaged files names. `details` are other fields of DatasetSpec
    (titanlite/data/spec.py), such as `has_tokens` and `fields`. Raises ValueError if a different
    data set has that name.
    """
    details.setdefault("description", name)
    DATASETS.add(DatasetSpec(name=name, build=build, **details))


def register_loss(
    name: str,
    total: str | Callable[..., Any],
    count: str | Callable[..., Any] | None = None,
    *,
    over: Literal["samples", "batch"] = "samples",
) -> None:
    """Register a loss, for `training.loss = "name"`.

    `total(outputs, batch)` is the sum of the losses of a batch, a scalar tensor, and `count(batch)`
    is the number of its terms, by default the targets that are not -100. The step divides by the
    count of the whole global batch.

    The loss of a sample must not depend on other samples, of which other ranks and microbatches may
    have some, unless `over` is "batch". Then `total` gets the outputs and fields of the global
    batch, gathered over the data-parallel ranks, and gradients flow back (docs/losses.md). Such a
    job can neither accumulate gradients nor cut its batch into microbatches. Raises ValueError for
    another `over`, and if a different loss has that name.
    """
    if over not in ("samples", "batch"):
        raise ValueError(f'over: {over!r} is not one of its values; give "samples" or "batch"')
    LOSSES.add(LossSpec(name, total, count, over))


def register_metric(name: str, function: str | Callable[..., Any]) -> None:
    """Register a metric, for `validation.metrics = ["name"]`.

    `function(outputs, batch)` returns (sum, count) for a batch, as numbers or scalar tensors; the
    metric is sum / count over the whole validation set. Targets of -100 must not be counted: copies
    of the last sample, which fill the last batch, have no others. Sharded logits are gathered
    before the call. Raises ValueError if a different metric has that name, and for the name "loss".
    """
    if name == "loss":
        raise ValueError('"loss" is the validation loss; give the metric another name')
    METRICS.add(FunctionSpec(name, function))


def register_optimizer(name: str, build: str | Callable[..., Any]) -> None:
    """Register an optimizer, for `optimizer.name = "name"`.

    `build(groups, settings)` returns a torch.optim.Optimizer of `groups`, parameter groups of torch
    with "lr" and "weight_decay"; `settings` has the keys of [optimizer]. Parameters may be DTensors
    (gather them for whole matrices). State is a scalar tensor, or has the parameter's shape and
    placements. Raises ValueError if a different optimizer has that name.
    """
    OPTIMIZERS.add(FunctionSpec(name, build))


def register_scheduler(name: str, factor: str | Callable[..., float]) -> None:
    """Register a learning-rate schedule, for `lr_scheduler.decay_type = "name"`.

    `factor(step, warmup_steps=..., decay_steps=..., total_steps=..., min_lr_factor=...)` is the
    factor on the learning rate at `step`, counted from 0. Raises ValueError if a different one has
    that name.
    """
    SCHEDULERS.add(FunctionSpec(name, factor))


LOSSES.home = METRICS.home = OPTIMIZERS.home = SCHEDULERS.home = __name__
_OF_LOSSES = "titanlite.training.loss:"
LOSSES.add(LossSpec(WEIGHTED, f"{_OF_LOSSES}weighted_loss", f"{_OF_LOSSES}sum_of_weights"))
LOSSES.add(LossSpec("squared_error", f"{_OF_LOSSES}squared_error", None))
LOSSES.add(LossSpec("contrastive", f"{_OF_LOSSES}contrastive", None, "batch"))
METRICS.add(FunctionSpec("accuracy", "titanlite.training.metrics:accuracy"))
for _name in ("AdamW", "Adam", "SGD", "Muon"):
    OPTIMIZERS.add(FunctionSpec(_name, "titanlite.training.optimizer:build_optimizer"))
for _name in ("linear", "sqrt", "cosine"):
    SCHEDULERS.add(FunctionSpec(_name, "titanlite.training.optimizer:lr_factor"))
