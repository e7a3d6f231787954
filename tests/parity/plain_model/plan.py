"""How the plain model is cut, with PyTorch's own styles; activations are whole on every rank."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from plain_model.model import PlainModel
from titanlite.parallelize.plan import ParallelPlan

PLANS = {
    PlainModel: ParallelPlan(
        tensor_parallel={
            "tok_emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "layers.*.w1": ColwiseParallel(),
            "layers.*.w2": RowwiseParallel(output_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        },
        loss_parallel={"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
        blocks="layers",
        embeddings=("tok_emb",),
        head=("output",),
    )
}
