"""Frozen feed-forward blocks on tokens; each has a trained adapter beside its first product."""

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lora_model.sizes import Sizes
from titanlite.parallelize import ParallelPlan


class Block(nn.Module):
    """A residual block: down(gelu((up + b a)(x)))."""

    def __init__(self, sizes: Sizes, has_adapter: bool) -> None:
        super().__init__()
        hidden = 2 * sizes.dim
        self.norm = nn.LayerNorm(sizes.dim)
        self.up, self.down = nn.Linear(sizes.dim, hidden), nn.Linear(hidden, sizes.dim)
        self.requires_grad_(False)
        self.a = nn.Linear(sizes.dim, sizes.rank, bias=False) if has_adapter else None
        self.b = nn.Linear(sizes.rank, hidden, bias=False) if has_adapter else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = self.up(y)
        if self.a is not None and self.b is not None:
            hidden = hidden + self.b(self.a(y))
        return x + self.down(nn.functional.gelu(hidden))


class Model(nn.Module):
    """Embedding, blocks and head, frozen but for the adapters."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab_size, sizes.dim).requires_grad_(False)
        self.blocks = nn.ModuleDict(
            {str(i): Block(sizes, i >= sizes.first_adapter) for i in range(sizes.num_layers)}
        )
        self.head = nn.Linear(sizes.dim, sizes.vocab_size).requires_grad_(sizes.trains_head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


PLAN = ParallelPlan(
    tensor_parallel={
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.b": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    },
    blocks="blocks",
    embeddings=("embed",),
    head=("head",),
    sequence_dim=None,
)
