"""How the rotary model is cut, with PyTorch's own styles: without and with sequence parallelism."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from rotary_model.model import RotaryModel, SequenceParallelRotaryModel
from titanlite.parallelize.plan import ParallelPlan

PLANS = {
    # Megatron-LM's first form (arXiv 1909.08053): activations are whole between blocks.
    RotaryModel: ParallelPlan(
        tensor_parallel={
            "tok_emb": RowwiseParallel(input_layouts=Replicate()),
            "layers.*.attention.wq": ColwiseParallel(),
            "layers.*.attention.wk": ColwiseParallel(),
            "layers.*.attention.wv": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(),
            "layers.*.feed_forward.w1": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
        loss_parallel={"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
        embeddings=("tok_emb",),
        head=("norm", "output"),
        sequence_dim=None,
    ),
    SequenceParallelRotaryModel: ParallelPlan(
        tensor_parallel={
            "tok_emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "layers.*.attention.wq": ColwiseParallel(),
            "layers.*.attention.wk": ColwiseParallel(),
            "layers.*.attention.wv": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.*.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "layers.*.feed_forward.w1": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        loss_parallel={
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            )
        },
        embeddings=("tok_emb",),
        head=("norm", "output"),
        sequence_dim=1,
    ),
}
