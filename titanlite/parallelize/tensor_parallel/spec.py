"""Tensor parallelism: modules sharded over tp; torch-free."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from titanlite.errors import nearest
from titanlite.fields import MODEL, Section, key, reads
from titanlite.mesh.parallel_dims import divisors
from titanlite.parallelize.feature import Feature, Variation

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class TensorParallelKeys(Section):
    """The keys of tensor parallelism in [parallelism]"""

    tensor_parallel_degree: PositiveInt = key(
        1, "shards of heads and hidden units (TP), and of the sequence in between (SP)"
    )
    disable_loss_parallel: bool = key(
        False, "TP: all-gather the logits instead of sharding the loss"
    )


@reads(MODEL, "parallelism.tensor_parallel_degree", "parallelism.disable_loss_parallel")
def _loss_parallel(job: "Draft") -> Iterator[str]:
    """With loss parallel or FSDP2, each tensor parallel rank has a part of the vocabulary."""
    vocab, tp = getattr(job.model, "vocab_size", None), job.dims.tp
    is_whole = job.config.parallelism.disable_loss_parallel
    if vocab is None or tp == 1 or (is_whole and not job.dims.fsdp_enabled) or job.misfits:
        return

    def count_parts(degree: int) -> int:
        return math.ceil(vocab / math.ceil(vocab / degree))

    if count_parts(tp) < tp:
        legal = [n for n in divisors(tp) if count_parts(n) == n]
        yield (
            f"parallelism.tensor_parallel_degree: {tp} leaves {tp - count_parts(tp)} ranks without "
            f"a part of model.vocab_size {vocab}, but {'FSDP2' if is_whole else 'loss parallel'} "
            f"needs one on each rank; give {nearest(tp, legal)}"
            + (", or set parallelism.disable_loss_parallel = true" * (not job.dims.fsdp_enabled))
        )


TENSOR_PARALLEL = Feature(
    "tensor parallel",
    "tensor_parallel",
    is_on=lambda config: config.parallelism.tensor_parallel_degree > 1,
    checks=(_loss_parallel,),
    variations=(
        Variation(
            "loss parallel", {"on": {}, "off": {"parallelism.disable_loss_parallel": True}}, ("tp",)
        ),
    ),
)
