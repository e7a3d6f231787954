# dit/plan.py
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.parallelize import ParallelPlan

PLAN = ParallelPlan(
    tensor_parallel={
        **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")},
    },
    blocks="blocks",
    embeddings=("embed",),
    head=("head",),
    sequence_dim=None,
)
