"""How the image transformer is sharded: its parallel plans, as data.

The residual stream is sharded over the sequence (Megatron's sequence parallelism, arXiv
2205.05198). Each half of a block all-gathers the sequence once for all its projections, and
reduce-scatters its output. The sequence is dimension 0 in blocks and dimension 1 in embeddings.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.models.image_transformer.model import ImageEmbeddings, ImageTransformer
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.tensor_parallel.styles import (
    EmbeddingLocal,
    GatherColwise,
    NormLocal,
    RowwiseLocal,
    TokenDropoutLocal,
)

TABLES = ("tok_emb", "row_emb", "col_emb", "chan_emb")

PLANS = {
    # Rowwise, for a large vocabulary; the output is reduce-scattered over the sequence.
    ImageEmbeddings: ParallelPlan(
        tensor_parallel={
            table: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            for table in TABLES
        }
    ),
    ImageTransformer: ParallelPlan(
        tensor_parallel={
            # With a few hundred values per pixel, tables are far smaller than activations.
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
            )
        },
        blocks="layers",
        embeddings=("embeddings",),
        head=("norm", "output"),
        attention="attention.inner",
    ),
}
