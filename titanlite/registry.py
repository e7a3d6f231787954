"""Register a model, data set, loss or metric of your own, so that a job can name it. No torch.

    titanlite.register_model("vit", "vit.model:ViT", "vit.sizes:Sizes", plan="vit.plan:PLAN")

Call these functions from a module that `experimental.custom_import` names, or from Python before
`titanlite.train(...)`. "module:attribute" is imported when it is first needed; an object works too,
but then the registering module has to import what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titanlite import models
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
    hf: Any = None,
) -> None:
    """Register a model as `name`; titanlite/models/__init__.py explains the arguments.

    Raises ValueError if a different model has that name.
    """
    register(ModelSpec(name, config, build, plan, flavors, init, inputs, output, hf))


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
    catalog.register(DatasetSpec(name=name, build=build, **details))


@dataclass(frozen=True)
class LossSpec:
    """A registered loss: functions, or "module:attribute" of each."""

    name: str
    total: str | Callable[..., Any]
    count: str | Callable[..., Any] | None
    over: Literal["samples", "batch"] = "samples"

    def load(self) -> Any:
        """The Loss; imports torch."""
        from titanlite.batch import Batch
        from titanlite.training.loss import Loss

        return Loss(load(self.total), load(self.count) or Batch.count_targets)


def is_over_batch(name: str | None) -> bool:
    """Whether the registered loss of that name is over the whole batch."""
    return name in LOSSES and LOSSES[name].over == "batch"


LOSSES: dict[str, LossSpec] = {}
"""The registered losses, which training.loss can name."""

LOSSES_REGISTERED_BY: dict[str, set[str]] = {}
"""Name of a loss -> the modules whose import registered it."""


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
    spec = LossSpec(name, total, count, over)
    models.enter(spec, LOSSES, LOSSES_REGISTERED_BY, "loss")


@dataclass(frozen=True)
class MetricSpec:
    """A registered metric: a function, or its "module:attribute"."""

    name: str
    function: str | Callable[..., Any]

    def load(self) -> Any:
        """The function; imports torch."""
        return load(self.function)


METRICS = {"accuracy": MetricSpec("accuracy", "titanlite.training.metrics:accuracy")}
"""The registered metrics, which validation.metrics can name."""

METRICS_REGISTERED_BY: dict[str, set[str]] = {"accuracy": {__name__}}
"""Name of a metric -> the modules whose import registered it."""


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
    models.enter(MetricSpec(name, function), METRICS, METRICS_REGISTERED_BY, "metric")


Specs = list[tuple[str, Any]]
"""Registered specs with their kinds, such as "model"."""

_sent: set[tuple[str, str]] = set()


def _table(kind: str) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """The specs of a kind by name, and the modules that registered them."""
    tables: dict[str, tuple[dict[str, Any], dict[str, set[str]]]] = {
        "model": (models.MODELS, models.REGISTERED_BY),
        "data set": (catalog.DATASETS, catalog.REGISTERED_BY),
        "loss": (LOSSES, LOSSES_REGISTERED_BY),
        "metric": (METRICS, METRICS_REGISTERED_BY),
    }
    return tables[kind]


KINDS = ("model", "data set", "loss", "metric")


def registers_something(module: str) -> bool:
    """Whether `module`, or a module of that package, has registered anything."""
    for kind in KINDS:
        table, registered_by = _table(kind)
        if any(_is_by(module, by) for name, by in registered_by.items() if name in table):
            return True
    return False


def specs_to_send(used: Mapping[str, Iterable[str | None]], custom_import: str) -> Specs:
    """The specs that a rank cannot import: those that the calling script has registered.

    `used` has the names that a job uses, by kind. Specs of titanlite and of `custom_import` are
    left out.
    """
    found = []
    for kind, names in used.items():
        table, registered_by = _table(kind)
        for name in names:
            by = registered_by.get(name or "", set())
            is_own = not by & {models.__name__, catalog.__name__, __name__}
            if name in table and is_own and not (custom_import and _is_by(custom_import, by)):
                found.append((kind, table[name]))
    return found


def take_sent(specs: Specs) -> None:
    """Register specs that were sent, unless this process has its own of that name."""
    for kind, spec in specs:
        table, _ = _table(kind)
        if spec.name not in table or (kind, spec.name) in _sent:
            table[spec.name] = spec
            _sent.add((kind, spec.name))


def _is_by(module: str, by: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for name in by)
