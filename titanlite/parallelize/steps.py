"""The features, and the parallelize steps in their order; torch-free.

Pipeline parallelism is a feature, but no step: it splits the model into stages first, and each
stage then goes through the same steps.
"""

from typing import TYPE_CHECKING

from titanlite.parallelize.activation_checkpoint.spec import ACTIVATION_CHECKPOINT
from titanlite.parallelize.async_tensor_parallel.spec import ASYNC_TENSOR_PARALLEL
from titanlite.parallelize.compile.spec import COMPILE
from titanlite.parallelize.context_parallel.spec import CONTEXT_PARALLEL
from titanlite.parallelize.expert_parallel.spec import EXPERT_PARALLEL
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.float8.spec import FLOAT8
from titanlite.parallelize.fsdp.spec import DATA_PARALLEL
from titanlite.parallelize.lora.spec import LORA
from titanlite.parallelize.pipeline_parallel.spec import PIPELINE_PARALLEL
from titanlite.parallelize.tensor_parallel.spec import TENSOR_PARALLEL

if TYPE_CHECKING:
    from titanlite.config.schema import JobConfig


STEPS: tuple[Feature, ...] = (
    # Its adapters are parameters of the plain model, which all other steps then work on.
    LORA,
    # It replaces linear layers, which all other steps then work on.
    FLOAT8,
    # Its plan names the model's own modules, before wrappers rename them.
    TENSOR_PARALLEL,
    # It reports which TP modules are rings, and configures the compiler before it runs.
    ASYNC_TENSOR_PARALLEL,
    # It distributes the experts, which no other step cuts, before blocks are wrapped.
    EXPERT_PARALLEL,
    # It replaces the attention inside each block, before blocks are wrapped.
    CONTEXT_PARALLEL,
    # It wraps blocks whose modules are already sharded.
    ACTIVATION_CHECKPOINT,
    # After it, so that recomputation is part of the compiled graph.
    COMPILE,
    # Last, so that its hooks stay outside the compiled blocks.
    DATA_PARALLEL,
)
"""The features in the order in which they are applied to every model and every pipeline stage."""

FEATURES = (PIPELINE_PARALLEL, *STEPS)


def features_on(config: "JobConfig") -> list[Feature]:
    return [feature for feature in FEATURES if feature.is_on(config)]


def depends_on_microbatch(config: "JobConfig") -> bool:
    """Whether the numbers of a sequence depend on the other sequences of its microbatch."""
    return any(feature.depends_on_microbatch for feature in features_on(config))
