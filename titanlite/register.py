"""Register a model, data set, loss or metric of your own, so that a job can name it. No torch.

    titanlite.register_model("vit", "vit.model:ViT", "vit.sizes:Sizes", plan="vit.plan:PLAN")

Call these functions from a module that `experimental.custom_import` names, or from Python before
`titanlite.train(...)`. "module:attribute" is imported when it is first needed; an object works too,
but then the registering module has to import what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import titanlite.data.catalog
import titanlite.models  # noqa: F401 (what is built in is registered first)
from titanlite.data.spec import Dataset, DatasetSpec
from titanlite.models.spec import ModelSpec
from titanlite.registry import DATASETS, LOSSES, METRICS, MODELS, LossSpec, MetricSpec


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
    "validation". `path` is the folder of its files, and `path_key` the name of the key that set it:
    if files are missing or damaged, `build` raises a ConfigError that names `path_key`. `details`
    are the other fields of DatasetSpec (titanlite/data/spec.py) besides `name` and `build`, such as
    `has_tokens` and `fields`. Raises ValueError if a different data set has that name.
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
    count of the whole global batch, so microbatches and ranks may have different counts.

    The loss of a sample must not depend on the other samples, because each rank and microbatch has
    only some of them, unless `over` is "batch". Then `total` gets the outputs and fields of the
    global batch, gathered over the data-parallel ranks, and gradients flow back to the rank of each
    sample (docs/losses.md). Such a job can neither accumulate gradients nor cut its batch into the
    microbatches of a pipeline. Raises ValueError for another `over`, and if a different loss has
    that name.
    """
    if over not in ("samples", "batch"):
        raise ValueError(f'over: {over!r} is not one of its values; give "samples" or "batch"')
    LOSSES.add(LossSpec(name, total, count, over))


def register_metric(name: str, function: str | Callable[..., Any]) -> None:
    """Register a metric, for `validation.metrics = ["name"]`.

    `function(outputs, batch)` returns (sum, count) for a batch, as numbers or scalar tensors. The
    value is the sum over the whole validation set divided by the count over the set. Targets of
    -100 must not be counted: if the last batch is not full, it is filled with copies of the last
    sample, and all targets of these copies are -100. Sharded logits are gathered before the call.
    Raises ValueError if a different metric has that name, and for the name "loss".
    """
    if name == "loss":
        raise ValueError('"loss" is the validation loss; give the metric another name')
    METRICS.add(MetricSpec(name, function))


METRICS.home = __name__
METRICS.add(MetricSpec("accuracy", "titanlite.training.metrics:accuracy"))
