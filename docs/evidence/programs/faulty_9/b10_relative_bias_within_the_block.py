"""A bidirectional encoder with T5's relative position bias and a sequence that is cut over the ranks, keys and values gathered.

Thread: of the kind NVIDIA/TransformerEngine issue #1046 "why context parallel do not support alibi?" (2024): after the
sequence is split, the kernel does not know the offset of a chunk, so the bias of relative positions is wrong for each
chunk.
Fault: in SplitAttention.forward, the distances of the bias are counted from the start of the rank's block of queries,
while the keys are those of the whole sequence.
REPAIR: `queries = torch.arange(q.shape[2])` -> `queries = torch.arange(q.shape[2]) + dist.get_rank(self.group) * q.shape[2]`
Expected: in the forward pass, layers.0.attention is the first module whose output differs, on all ranks but rank 0: the
relative position bias is computed with the query positions of the own block, which start at 0 on every rank; the offset
of the block (rank times its length) is missing. Rank 0 agrees in the first layer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, REACH, CLASSES = 10, 8, 2, 3, 4


class Gather(torch.autograd.Function):
    """All ranks' blocks along the dimension; in backward, the sum of the ranks' gradients of the own block."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return gradient.chunk(size, ctx.dim)[rank], None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.bias = nn.Embedding(2 * REACH + 1, HEADS)

    def heads(self, x):
        return (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def attend(self, q, k, v, distance):
        bias = self.bias(distance.clamp(-REACH, REACH) + REACH).permute(2, 0, 1)
        y = scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(len(q), -1, -1, -1))
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        return self.attend(*self.heads(x), positions - positions[:, None])


class SplitAttention(Attention):
    """The attention of a rank's block of queries to the keys of all blocks."""

    def __init__(self, whole, group):
        super().__init__()
        self.qkv, self.out, self.bias, self.group = whole.qkv, whole.out, whole.bias, group

    def forward(self, x):
        q, k, v = self.heads(x)
        k, v = Gather.apply(k, 2, self.group), Gather.apply(v, 2, self.group)
        queries = torch.arange(q.shape[2])
        return self.attend(q, k, v, torch.arange(k.shape[2]) - queries[:, None])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attention()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tags"].flatten())


def parallel(mesh):
    model, group = Tagger(), mesh.get_group("cp")
    for layer in model.layers:
        layer.attention = SplitAttention(layer.attention, group)
    return DistributedDataParallel(model, process_group=group)


generator = torch.Generator().manual_seed(207)


def draw():
    tokens = torch.randint(VOCAB, (3, 9), generator=generator)
    return {"tokens": tokens, "tags": torch.randint(CLASSES, (3, 9), generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Tagger, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
