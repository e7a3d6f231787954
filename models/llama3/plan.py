"""How Llama 3 is sharded: its parallel plan, as data.

The residual stream is sharded over the sequence (Megatron's sequence parallelism, arXiv
2205.05198). Each half of a block all-gathers the sequence once for all its projections, and
reduce-scatters its output. Embedding table and output layer are sharded over the vocabulary, tied
or not.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from titanlite.models.llama3.model import Llama3
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.styles import EmbeddingRowwise, GatherColwise, NormLocal, RowwiseLocal

PLANS = {
    Llama3: ParallelPlan(
        tensor_parallel={
            "tok_embeddings": EmbeddingRowwise(scatter_dim=0),
            "layers.*.attention_norm": NormLocal(),
            "layers.*.attention": GatherColwise(0, "wq", "wk", "wv"),
            "layers.*.attention.wo": RowwiseLocal(scatter_dim=0),
            "layers.*.ffn_norm": NormLocal(),
            "layers.*.feed_forward": GatherColwise(0, "w1", "w3"),
            "layers.*.feed_forward.w2": RowwiseLocal(scatter_dim=0),
            "norm": NormLocal(),
            # The output layer's input has the batch first.
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        loss_parallel={
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
        blocks="layers",
        embeddings=("tok_embeddings",),
        head=("norm", "output"),
        attention="attention.inner",
    ),
}
