"""Data parallelism: weights sharded by FSDP2, or replicated by FSDP2 or DDP; torch-free."""

from typing import Literal

from pydantic import PositiveInt

from titanlite.fields import CountOrMinusOne, Section, key
from titanlite.mesh.parallel_dims import axes_where
from titanlite.parallelize.feature import Feature, Variation


class DataParallelKeys(Section):
    """The keys of data parallelism in [parallelism]"""

    data_parallel_replicate_degree: PositiveInt = key(
        1, "replicas of the weights (DDP; HSDP with a shard degree)"
    )
    data_parallel_shard_degree: CountOrMinusOne = key(
        -1, "shards of the weights (FSDP2); -1: the number of ranks divided by the other degrees"
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", "whether FSDP frees gathered weights after the forward pass"
    )


SHARDED = axes_where(weights="sharded")
RESHARD, OFFLOAD = "parallelism.fsdp_reshard_after_forward", "training.enable_cpu_offload"

DATA_PARALLEL = Feature(
    "data parallel",
    "fsdp",
    is_on=lambda config: True,  # mixed precision needs FSDP2 even on one rank
    variations=(
        Variation.of_key("reshard", RESHARD, ("default", "always", "never"), SHARDED),
        Variation("offload", {"on": {OFFLOAD: True}, "off": {}}, SHARDED),
    ),
    off={OFFLOAD: False},
)
