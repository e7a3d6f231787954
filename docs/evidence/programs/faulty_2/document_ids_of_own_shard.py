"""No attention across documents, with the sequence sharded: documents are counted from each shard's start.

Thread: https://github.com/ServiceNow/Fast-LLM/pull/177 "optionally prevent cross-document attention",
2025-03-07 (its first version "does not currently work with sequence_data_parallel > 1").
Wrong: each rank numbers the documents of its own tokens from 0 before keys, values and numbers are
gathered, so tokens of rank 1 attend to documents of rank 0 that have the same number.
A right diagnosis says: the error is inside attention on rank 1 of sdp, between the outputs of query and
key_value and the input of dense (the document mask); rank 0 agrees in the forward pass.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, VOCAB, END = 16, 2, 20, 0


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.query, self.key_value = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, x, document, position):
        q, kv = self.query(x), self.key_value(x)
        key_document, key_position = document, position
        if self.group is not None:
            kv = GatherSequence.apply(kv, self.group)
            key_document = GatherSequence.apply(document, self.group)
            key_position = GatherSequence.apply(position, self.group)
        mask = document[:, :, None] == key_document[:, None, :]
        mask = mask & (position[:, :, None] >= key_position[:, None, :])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.dense(out.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, position):
        ends = tokens == END
        document = ends.cumsum(1) - ends.long()  # the end token belongs to its document
        x = self.embedding(tokens)
        x = x + self.attention(self.norm_1(x), document, position)
        x = x + self.mlp(self.norm_2(x))
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["position"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def build(mesh):
    model = GPT()
    model.attention.group = mesh.get_group("sdp")
    return nn.parallel.DistributedDataParallel(model)


def make_batch(generator):
    tokens = torch.randint(1, VOCAB, (3, 10), generator=generator)
    for row, ends in enumerate([(2, 6), (0, 3, 8), (4, 7)]):
        tokens[row, list(ends)] = END
    labels = torch.randint(VOCAB, (3, 10), generator=generator)
    return {"tokens": tokens, "labels": labels, "position": torch.arange(10).repeat(3, 1)}


rng = torch.Generator().manual_seed(34)
batches = [make_batch(rng) for _ in range(3)]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"sdp": 2}, split={"sdp": 1})
    print(titanlite.compare(GPT, build, **options))
