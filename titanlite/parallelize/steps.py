"""The features, and the parallelize steps in their order; torch-free.

Pipeline parallelism is a feature, but no step: it splits the model into stages first, and each
stage then goes through the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlite.parallelize.activation_checkpoint.spec import ACTIVATION_CHECKPOINT
from titanlite.parallelize.async_tensor_parallel.spec import ASYNC_TENSOR_PARALLEL
from titanlite.parallelize.compile.spec import COMPILE
from titanlite.parallelize.context_parallel.spec import CONTEXT_PARALLEL
from titanlite.parallelize.expert_parallel.spec import EXPERT_PARALLEL
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.parallelize.fsdp.spec import DATA_PARALLEL
from titanlite.parallelize.pipeline_parallel.spec import PIPELINE_PARALLEL
from titanlite.parallelize.tensor_parallel.spec import TENSOR_PARALLEL

if TYPE_CHECKING:
    from titanlite.config.schema import JobConfig


@dataclass(frozen=True)
class Step:
    """One step: its feature, and the reason for its place in the order."""

    feature: Feature
    why_here: str


STEPS = (
    Step(FLOAT8, "it replaces linear layers, which all other steps then work on"),
    Step(
        TENSOR_PARALLEL,
        "its plan names the model's own modules, before wrappers rename them",
    ),
    Step(
        ASYNC_TENSOR_PARALLEL,
        "it reports which TP modules are rings, and configures the compiler before it runs",
    ),
    Step(
        EXPERT_PARALLEL,
        "it distributes the experts, which no other step cuts, before blocks are wrapped",
    ),
    Step(
        CONTEXT_PARALLEL,
        "it replaces the attention inside each block, before blocks are wrapped",
    ),
    Step(ACTIVATION_CHECKPOINT, "it wraps blocks whose modules are already sharded"),
    Step(COMPILE, "after it, so that recomputation is part of the compiled graph"),
    Step(DATA_PARALLEL, "last, so that its hooks stay outside the compiled blocks"),
)
"""The steps in the order in which they are applied to every model and every pipeline stage."""

FEATURES = (PIPELINE_PARALLEL, *(step.feature for step in STEPS))


def features_on(config: JobConfig) -> list[Feature]:
    """The features that a job asks for."""
    return [feature for feature in FEATURES if feature.is_on(config)]


def depends_on_microbatch(config: JobConfig) -> bool:
    """Whether the numbers of a sequence depend on the other sequences of its microbatch."""
    return any(feature.depends_on_microbatch for feature in features_on(config))


def loss_tolerance(config: JobConfig) -> float | None:
    """The largest of the features' loss_tolerance; None if no feature has one."""
    found = [f.loss_tolerance for f in features_on(config) if f.loss_tolerance is not None]
    return max(found, default=None)
