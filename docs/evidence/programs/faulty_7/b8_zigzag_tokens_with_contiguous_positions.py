"""Context parallelism with zigzag chunks: the learned positions are those of a contiguous shard.

Thread: of the kind "position_ids are wrong with load-balanced context parallelism" (ring-flash-attention, EasyContext,
Megatron-LM's get_batch_on_this_cp_rank, torch's context_parallel with buffers left out), 2024 and 2025.
Wrong: rank r has chunks r and 3 - r of four. The attention mask uses these positions. The position embedding gets
r * length + (0, 1, ...) instead, which is right for the first chunk of rank 0 alone.
PLACE: positions (embedding), forward pass, its input (the position ids) on the ranks
KIND: position ids of contiguous shards for tokens in zigzag order
REPAIR: `index = rank * tokens.shape[1] + torch.arange(tokens.shape[1])` -> `index = zigzag(rank, size, LENGTH)`
EXPECT: in the forward pass, the output of positions is the first that differs, on all ranks, because its input does:
the position ids are those of a contiguous shard (0-5 and 6-11) while the rank's tokens are zigzag chunks (0-2 with
9-11, and 3-5 with 6-8). On rank 0 the first chunk is right. The output of embed agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH = 13, 8, 12


class Gather(torch.autograd.Function):
    """All ranks' tensors along dimension 1; the gradient is added up and cut."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        n, i = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(n, 1)[i], None


def zigzag(rank, size, length):
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x, group=None):
        q, kv = self.q(x), self.kv(x)
        at = keys = torch.arange(LENGTH)
        if group is not None:
            n, i = dist.get_world_size(group), dist.get_rank(group)
            kv = Gather.apply(kv, group)
            at, keys = zigzag(i, n, LENGTH), torch.cat([zigzag(r, n, LENGTH) for r in range(n)])
        k, v = kv.chunk(2, -1)
        scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(keys > at[:, None], float("-inf"))
        return self.o(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def index(self, tokens):
        return torch.arange(tokens.shape[1])

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(self.index(tokens))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), self.group)
        return self.head(x)


class ParallelModel(Model):
    def index(self, tokens):
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        index = rank * tokens.shape[1] + torch.arange(tokens.shape[1])
        assert size * tokens.shape[1] == LENGTH
        return index


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def split(batch, mesh):
    mine = zigzag(mesh.get_local_rank("cp"), mesh["cp"].size(), LENGTH)
    return {name: tensor[:, mine] for name, tensor in batch.items()}


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(ParallelModel(group), process_group=group)


generator = torch.Generator().manual_seed(14)


def draw():
    return torch.randint(VOCAB, (2, LENGTH), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
