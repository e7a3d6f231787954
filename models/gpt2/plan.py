"""How GPT-2 is sharded: its parallel plan, as data.

As Megatron-LM with sequence parallelism (arXiv 2205.05198): the residual stream is sharded over the
sequence, and the one table of embeddings and output layer over the vocabulary. The table of
positions is replicated.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from titanlite.models.gpt2.model import GPT2
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.tensor_parallel.styles import (
    EmbeddingLocal,
    EmbeddingRowwise,
    GatherColwise,
    NormLocal,
    RowwiseLocal,
    TokenDropoutLocal,
)

PLANS = {
    GPT2: ParallelPlan(
        tensor_parallel={
            "tok_embeddings": EmbeddingRowwise(scatter_dim=0),
            "pos_embeddings": EmbeddingLocal(dim=0),
            "embedding_dropout": TokenDropoutLocal(0),
            "layers.*.attention_norm": NormLocal(),
            "layers.*.attention": GatherColwise(0, "wq", "wk", "wv"),
            "layers.*.attention.wo": RowwiseLocal(scatter_dim=0),
            "layers.*.attention_dropout": TokenDropoutLocal(0),
            "layers.*.ffn_norm": NormLocal(),
            "layers.*.feed_forward": GatherColwise(0, "w1"),
            "layers.*.feed_forward.w2": RowwiseLocal(scatter_dim=0),
            "layers.*.ffn_dropout": TokenDropoutLocal(0),
            "norm": NormLocal(),
            # The output layer's input has the batch first.
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        loss_parallel={
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            )
        },
        blocks="layers",
        embeddings=("tok_embeddings", "pos_embeddings"),
        head=("norm", "output"),
        attention="attention.inner",
    )
}
