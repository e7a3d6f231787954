"""How the image transformer is cut: its parallelize plans, as data.

The residual stream is sharded over the sequence (Megatron's sequence parallelism, arXiv
2205.05198): each half of a block gathers the sequence once, whatever the number of projections
that read it, and scatters its output's sum. Blocks hold the sequence first, the embeddings second.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.models.image_transformer.model import ImageEmbeddings, ImageTransformer
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.styles import (
    EmbeddingLocal,
    GatherColwise,
    NormLocal,
    RowwiseLocal,
    TokenDropoutLocal,
)

TABLES = ("tok_emb", "row_emb", "col_emb", "chan_emb")

PLANS = {
    # By rows, as a large vocabulary needs it; the sum is scattered over the sequence.
    ImageEmbeddings: ParallelPlan(
        tensor_parallel={
            table: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            for table in TABLES
        },
    ),
    ImageTransformer: ParallelPlan(
        tensor_parallel={
            # A pixel's few hundred values make tables far smaller than the activations.
            **{f"embeddings.{table}": EmbeddingLocal(dim=1) for table in TABLES},
            "embedding_dropout": TokenDropoutLocal(0),
            "layers.*.attention_norm": NormLocal(),
            "layers.*.attention": GatherColwise(0, "wq", "wk", "wv"),
            "layers.*.attention.wo": RowwiseLocal(scatter_dim=0),
            "layers.*.attention_dropout": TokenDropoutLocal(0),
            "layers.*.ffn_norm": NormLocal(),
            "layers.*.feed_forward": GatherColwise(0, "w1", "w3"),
            "layers.*.feed_forward.w2": RowwiseLocal(scatter_dim=0),
            "layers.*.ffn_dropout": TokenDropoutLocal(0),
            "norm": NormLocal(),
            "output": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
        loss_parallel={
            "output": ColwiseParallel(
                input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False
            ),
        },
        blocks="layers",
        embeddings=("embeddings",),
        head=("norm", "output"),
        attention="attention.inner",
    ),
}
