"""How Llama 3 is sharded: its parallel plan, as data.

The residual stream is sharded over the sequence (Megatron's sequence parallelism, arXiv
2205.05198). Each half of a block all-gathers the sequence once for all its projections, and
reduce-scatters its output. Embedding table and output layer are sharded over the vocabulary, tied
or not. Routed experts are not cut: they take the tokens of the residual stream as they are sharded.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from titanlite.models.llama3.model import Llama3
from titanlite.parallelize.expert_parallel.apply import GateLocal
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.tensor_parallel.styles import (
    EmbeddingRowwise,
    GatherColwise,
    NormLocal,
    RowwiseLocal,
)


def plan_of(model: Llama3) -> ParallelPlan:
    """The plan of a model with dense blocks, blocks with experts, or both."""
    config = model.config
    number = config.num_expert_layers
    half_blocks: dict[str, ParallelStyle] = {}
    if number < config.n_layers:
        half_blocks |= _feed_forward("layers.*.feed_forward")
    if number:
        half_blocks["layers.*.moe.router.gate"] = GateLocal()
    if number and config.moe_num_shared_experts:
        half_blocks |= _feed_forward("layers.*.moe.shared_experts")
    return ParallelPlan(
        tensor_parallel={
            "tok_embeddings": EmbeddingRowwise(scatter_dim=0),
            "layers.*.attention_norm": NormLocal(),
            "layers.*.attention": GatherColwise(0, "wq", "wk", "wv"),
            "layers.*.attention.wo": RowwiseLocal(scatter_dim=0),
            "layers.*.ffn_norm": NormLocal(),
            **half_blocks,
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
        embeddings=("tok_embeddings",),
        head=("norm", "output"),
        attention="attention.inner",
    )


def _feed_forward(name: str) -> dict[str, ParallelStyle]:
    return {name: GatherColwise(0, "w1", "w3"), f"{name}.w2": RowwiseLocal(scatter_dim=0)}


PLANS = {Llama3: plan_of}
