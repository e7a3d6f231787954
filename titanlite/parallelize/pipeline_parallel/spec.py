"""Pipeline parallelism: the model split into stages, by a schedule; torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveInt

from titanlite.fields import MODEL, Inert, Section, Values, key, reads
from titanlite.parallelize.feature import Feature, Variation
from titanlite.parallelize.fsdp.spec import RESHARD
from titanlite.schedule import SCHEDULES

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class PipelineParallelKeys(Section):
    """The keys of pipeline parallelism in [parallelism]"""

    pipeline_parallel_degree: PositiveInt = key(
        1, "ranks of a pipeline, each with one or more stages (PP)"
    )
    module_fqns_per_model_part: Values[Values[str]] | None = key(
        None, "PP: the names of each stage's modules"
    )
    pipeline_parallel_first_stage_less_layers: NonNegativeInt = key(
        1, "PP: how many blocks fewer the first stage has, for the embeddings"
    )
    pipeline_parallel_last_stage_less_layers: NonNegativeInt = key(
        1, "PP: how many blocks fewer the last stage has, for the output layer"
    )
    pipeline_parallel_layers_per_stage: PositiveInt | None = key(None, "PP: blocks per stage")
    pipeline_parallel_schedule: str = key(
        "1F1B", "PP: name of the schedule, such as 1F1B, Interleaved1F1B, ZBVZeroBubble"
    )
    pipeline_parallel_schedule_csv: str = key(
        "", "PP: CSV file with a schedule, used instead of the named one"
    )
    pipeline_parallel_microbatch_size: PositiveInt = key(1, "PP: sequences per microbatch")
    pipeline_parallel_expert_parallel_overlap: Inert[bool] = key(
        True, "PP: overlap with expert communication"
    )


PIPELINE_KEYS = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.module_fqns_per_model_part",
    "training.local_batch_size",
)


@reads(MODEL, *PIPELINE_KEYS)
def _pipeline(job: "Draft") -> Iterator[str]:
    """The blocks divide into the pipeline stages, local_batch_size divides into microbatches, and
    the schedule can run with them."""
    yield from job.pipeline_problems


@reads(MODEL, "compile", "activation_checkpoint", RESHARD, *PIPELINE_KEYS)
def _split_backward(job: "Draft") -> Iterator[str]:
    """PyTorch does not support a schedule that splits the backward pass with a compiled model,
    activation checkpointing by "op", or fsdp_reshard_after_forward = "always"."""
    if job.pipeline is None or not job.pipeline.schedule.splits_backward:
        return
    name = job.pipeline.schedule.name
    ac, compiled = job.config.activation_checkpoint, job.config.compile
    if ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            f'activation_checkpoint.selective_ac_option: "op" does not work with {name}, which '
            "computes input and weight gradients separately, because PyTorch can use the saved "
            'outputs only once; give "1" or another number, or set mode = "none"'
        )
    if compiled.enable and "model" in compiled.components:
        yield (
            f'compile.components: "model" does not work with {name}, which computes input and '
            'weight gradients separately; remove "model", or set '
            'parallelism.pipeline_parallel_schedule to "1F1B" or "Interleaved1F1B"'
        )
    if job.config.parallelism.fsdp_reshard_after_forward == "always":
        yield (
            f'{RESHARD}: "always" does not work with {name}, which computes input and weight '
            "gradients separately: if FSDP frees the weights in between, it loses weight "
            'gradients; give "default" or "never"'
        )


PIPELINE_PARALLEL = Feature(
    "pipeline parallel",
    "pipeline_parallel",
    is_on=lambda config: config.parallelism.pipeline_parallel_degree > 1,
    checks=(_pipeline, _split_backward),
    variations=(
        Variation.of_key("schedule", "parallelism.pipeline_parallel_schedule", SCHEDULES, ("pp",)),
    ),
)
