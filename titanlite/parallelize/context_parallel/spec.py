"""Context parallelism: sequences sharded over cp, with ring attention; torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from titanlite.errors import nearest, quote
from titanlite.fields import MODEL, Section, key, reads
from titanlite.mesh.parallel_dims import divisors
from titanlite.parallelize.feature import Feature, Variation
from titanlite.registry import DATASETS

if TYPE_CHECKING:
    from titanlite.config.draft import Draft


class ContextParallelKeys(Section):
    """The keys of context parallelism in [parallelism]"""

    context_parallel_degree: PositiveInt = key(1, "shards of the sequence (CP)")
    context_parallel_load_balancer: Literal["headtail", "striped", "none"] = key(
        "headtail", "CP: how tokens are distributed over ranks", lacking=("ptrr",)
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = key(
        "alltoall",
        "CP: all-gather keys and values, or pass them around a ring",
        torchtitan="allgather",
    )


@reads(
    MODEL,
    "parallelism.context_parallel_degree",
    "parallelism.context_parallel_load_balancer",
    "parallelism.tensor_parallel_degree",
    "training.seq_len",
    "training.dataset",
)
def _context_parallel(job: "Draft") -> Iterator[str]:
    """The CP degree (twice that for "headtail") times the TP degree divides the sequence length."""
    if not job.dims.cp_enabled:
        return
    spec = DATASETS.get(job.config.training.dataset)
    if spec is not None and not spec.has_tokens:
        dims = {name: dim for name, dim in spec.fields.items() if dim is not None}
        name = quote(job.config.training.dataset)
        if not dims:
            yield (
                f"parallelism.context_parallel_degree: {name} has no token dimension to split: "
                "`fields` of its registration gives None for every field; give the dimension of "
                "the tokens there, or set this degree to 1"
            )
            return
        if job.own_length is None:
            what = ", ".join(f"{field} along {dim}" for field, dim in dims.items())
            yield (
                f"parallelism.context_parallel_degree: the fields of {name} are split ({what}), "
                "but their length is not known; give the model's configuration class `seq_len`"
            )
            return
    layout = job.config.parallelism.context_parallel_load_balancer
    chunks = 2 if layout == "headtail" else 1
    if job.seq_len % (job.dims.cp * chunks * job.dims.tp):
        # TP alone is checked with the model's other sizes.
        rest = chunks * job.dims.tp
        legal = [degree for degree in divisors(job.seq_len) if job.seq_len % (degree * rest) == 0]
        factors = f"context_parallel_degree {job.dims.cp}"
        factors += ' x 2 ("headtail")' if chunks == 2 else ""
        factors += f" x tensor_parallel_degree {job.dims.tp}" if job.dims.tp > 1 else ""
        advice = f"give {nearest(job.dims.cp, legal)}" if legal else "use fewer ranks"
        yield (
            f"parallelism.context_parallel_degree: the {job.seq_len} tokens of a sequence "
            f"are not a multiple of {factors}; {advice}"
        )


BALANCER = "parallelism.context_parallel_load_balancer"
ROTATION = "parallelism.context_parallel_rotate_method"

CONTEXT_PARALLEL = Feature(
    "context parallel",
    "context_parallel",
    is_on=lambda config: config.parallelism.context_parallel_degree > 1,
    checks=(_context_parallel,),
    variations=(
        Variation.of_key("layout", BALANCER, ("headtail", "striped", "none"), ("cp",)),
        Variation.of_key("rotation", ROTATION, ("alltoall", "allgather"), ("cp",)),
    ),
)
