"""Expert parallelism: experts spread over ranks; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from titanlite.errors import nearest
from titanlite.fields import MODEL, NotYet, Section, key, reads
from titanlite.mesh.parallel_dims import divisors
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.fsdp.spec import RESHARD
from titanlite.parallelize.pipeline_parallel.spec import PIPELINE_KEYS

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class ExpertParallelKeys(Section):
    """The keys of expert parallelism in [parallelism]"""

    expert_parallel_degree: PositiveInt = key(
        1, "ranks that hold different experts (EP), of those of TP, then CP, then FSDP"
    )
    expert_tensor_parallel_degree: NotYet[PositiveInt] = key(1, "TP degree within experts")
    expert_parallel_comm_backend: Literal["standard"] = key(
        "standard", "EP: all-to-all implementation", lacking=("deepep",)
    )


EP = "parallelism.expert_parallel_degree"


@reads(
    MODEL,
    EP,
    "parallelism.data_parallel_shard_degree",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
)
def _expert_parallel(job: Draft) -> Iterator[str]:
    """The EP degree divides the product of the FSDP, CP and TP degrees, and the number of experts;
    each expert can be sharded over the ranks that EP leaves."""
    dims = job.dims
    if not dims.ep_enabled:
        return
    experts = job.num_experts
    if not experts:
        yield f"{EP}: {dims.ep}, but the model has no experts; remove this key"
        return
    room = dims.num_expert_ranks
    legal = [degree for degree in divisors(room) if experts % degree == 0]
    product = f"data_parallel_shard_degree {dims.dp_shard} x context_parallel_degree {dims.cp} x "
    product += f"tensor_parallel_degree {dims.tp} = {room}"
    if room % dims.ep:
        yield f"{EP}: {dims.ep} does not divide {product}; give {nearest(dims.ep, legal)}"
    elif experts % dims.ep:
        yield (
            f"{EP}: {dims.ep} does not divide the {experts} experts of a block; give "
            f"{nearest(dims.ep, legal)}"
        )


@reads(MODEL, "debug.moe_force_load_balance")
def _forced_balance(job: Draft) -> Iterator[str]:
    """debug.moe_force_load_balance needs a model with experts and titanlite's router."""
    if not job.config.debug.moe_force_load_balance:
        return
    if job.config.model.name == "hf" or not job.num_experts:
        yield (
            "debug.moe_force_load_balance: the model has no router of titanlite; remove this key"
        )


@reads(MODEL, "activation_checkpoint", RESHARD, EP, *PIPELINE_KEYS)
def _experts_by_operator(job: Draft) -> Iterator[str]:
    """Activation checkpointing by "op" of experts that have their own shards does not work in a
    pipeline with fsdp_reshard_after_forward = "always"."""
    ac, parallelism = job.config.activation_checkpoint, job.config.parallelism
    by_operator = ac.mode == "selective" and ac.selective_ac_option == "op"
    own_shards = job.dims.ep_enabled or job.dims.tp_enabled
    always = parallelism.fsdp_reshard_after_forward == "always"
    if by_operator and own_shards and always and job.dims.pp_enabled and job.num_experts:
        yield (
            f'{RESHARD}: "always" does not work with activation_checkpoint.selective_ac_option '
            '"op" in a pipeline of blocks with experts, because PyTorch would gather the experts '
            'inside a recomputation that it checks against the forward pass; give "default" or '
            '"never"'
        )


EXPERT_PARALLEL = Feature(
    "expert parallel",
    "expert_parallel",
    # Under TP, too, experts have shards of their own; and where TP or CP shards the tokens of a
    # sequence, an expert layer must know over which ranks.
    is_on=lambda config: (
        config.parallelism.expert_parallel_degree > 1
        or config.parallelism.tensor_parallel_degree > 1
        or config.parallelism.context_parallel_degree > 1
    ),
    checks=(_expert_parallel, _forced_balance, _experts_by_operator),
)
