"""Activation checkpointing: activations recomputed in the backward pass; torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from titanlite.fields import BlockIntervalOrOp, Fraction, NotYet, Section, Values, key, reads
from titanlite.parallelize.feature import Feature, Variation

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class ActivationCheckpoint(Section):
    """Recomputing activations in the backward pass instead of saving them"""

    mode: Literal["selective", "full", "memory_budget", "none"] = key(
        "selective",
        "what to recompute: by selective_ac_option, all, by memory_budget (with compile), or none",
    )
    selective_ac_option: BlockIntervalOrOp = key(
        "2", '"n": recompute every n-th block; "op": save some operators, recompute the rest'
    )
    per_op_sac_force_recompute_mm_shapes_by_fqns: Values[str] = key(
        ("moe.router.gate",),
        '"op": names of linear layers; products with weights of their shapes are recomputed',
    )
    early_stop: bool = key(
        False, "stop recomputation as soon as the last needed tensor is recomputed"
    )
    memory_budget: Fraction = key(
        0.5, "memory_budget: 0 recomputes everything, 1 saves what compile saves by default"
    )
    visualize_memory_budget_pareto: NotYet[bool] = key(
        False, "memory_budget: draw time against memory"
    )
    preserve_rng_state: bool = key(True, "recompute with the random state of the forward pass")
    determinism_check: Literal["default", "none"] = key(
        "default", "check shapes and dtypes of recomputed tensors, or do not"
    )
    debug: bool = key(False, "record recomputation for error messages (slow)")


@reads("activation_checkpoint", "compile")
def _recomputation(job: "Draft") -> Iterator[str]:
    """activation_checkpoint.mode "memory_budget" needs a compiled model; debug does not work with
    "op"."""
    ac, compiled = job.config.activation_checkpoint, job.config.compile
    if ac.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        yield (
            'activation_checkpoint.mode: "memory_budget" needs a compiled model; '
            'set compile.enable = true with "model" in compile.components, or give another mode'
        )
    if ac.debug and ac.mode == "selective" and ac.selective_ac_option == "op":
        yield (
            'activation_checkpoint.debug: PyTorch cannot record with selective_ac_option "op"; '
            'set it to false, or set selective_ac_option to "1"'
        )


MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"

ACTIVATION_CHECKPOINT = Feature(
    "activation checkpoint",
    "activation_checkpoint",
    is_on=lambda config: config.activation_checkpoint.mode != "none",
    sections={"activation_checkpoint": ActivationCheckpoint},
    checks=(_recomputation,),
    variations=(
        Variation(
            "checkpoint",
            {
                "none": {MODE: "none"},
                "full": {MODE: "full"},
                "every 2nd": {MODE: "selective", OPTION: "2"},
                "by operator": {MODE: "selective", OPTION: "op"},
            },
        ),
    ),
    off={MODE: "none"},
)
