"""Context parallelism by all-gather of keys and values (Llama 3's way), with zigzag chunks for balance.

Thread: zhuzilin/ring-flash-attention issue #81 "Implementing zigzag_llama3_flash_attn_varlen.py" (2025), and
NVIDIA/TransformerEngine pull request #1106 "Context Parallel Attention with All-Gather" (2024: reordering for causal
load balancing).
Wrong: rank r holds the chunks r and 2n-1-r, so the gathered keys are in the order of the chunks 0 3 1 2. The causal
mask gives the queries their true positions, but takes the gathered keys to be in the order of the sequence.
PLACE: blocks.*.attention (first blocks.0.attention), forward pass: its causal mask; q, k and v are right
KIND: causal mask for keys in sequence order on keys gathered in zigzag order
REPAIR: `keys = torch.arange(n * x.shape[1])` -> `keys = torch.cat([zigzag(r, n, n * x.shape[1]) for r in range(n)])`
EXPECT: in the forward pass, blocks.0.attention is the first module whose output differs, on all ranks (at all tokens but
0 to 2), while its qkv agrees: the causal mask is that of keys in sequence order, but the gathered keys and values are in zigzag order (0-2,
9-11, 3-5, 6-8), so queries see tokens ahead of them and miss earlier ones. Reorder the keys or the mask.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LENGTH = 16, 8, 2, 12


def zigzag(rank, n, length):
    chunks = torch.arange(length).chunk(2 * n)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


class Gather(torch.autograd.Function):
    """All ranks' tokens, one rank after the other; the gradients of all ranks are added in backward."""

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
        return gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x, positions):
        q, k, v = self.qkv(x).chunk(3, -1)
        keys = positions
        if self.group is not None:
            n = dist.get_world_size(self.group)
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
            keys = torch.arange(n * x.shape[1])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(keys > positions[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(group)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, positions):
        x = x + self.attention(self.norm1(x), positions)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        positions = torch.arange(LENGTH)
        if self.group is not None:
            positions = zigzag(dist.get_rank(self.group), dist.get_world_size(self.group), LENGTH)
        x = self.embed(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def split(batch, mesh):
    mine = zigzag(mesh.get_local_rank("cp"), mesh["cp"].size(), LENGTH)
    return {key: value[:, mine] for key, value in batch.items()}


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(GPT(group), process_group=group)


generator = torch.Generator().manual_seed(111)


def draw():
    return torch.randint(VOCAB, (3, LENGTH), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
