"""Keys and values are gathered over cp, and scaled_dot_product_attention is called with is_causal=True.

Thread: https://github.com/pytorch/pytorch/issues/108108 "Change default behavior of scaled_dot_product_attention's
causal masking alignment", 2023-08-28.
Wrong: with fewer queries than keys, torch's causal mask starts at the top left. The queries of the later ranks see
the keys of the first rank only, up to their own local number.
EXPECT: in the forward pass, the output of layers.0.attention is the first that differs, on every rank but rank 0: the
causal mask (is_causal=True in scaled_dot_product_attention) is aligned to the first keys and ignores the offset of the
rank's queries in the sequence.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import titanlite

VOCAB, DIM, HEADS, KV_HEADS, HEAD, SEQ = 14, 16, 4, 2, 4, 12


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        pieces = [t.contiguous() for t in grad.chunk(ctx.group.size(), 1)]
        out = torch.empty_like(pieces[0])
        dist.reduce_scatter(out, pieces, group=ctx.group)
        return out, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.cp_group = None
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)

    def forward(self, x):
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        if self.cp_group is not None:
            xk = GatherSequence.apply(xk, self.cp_group)
            xv = GatherSequence.apply(xv, self.cp_group)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (xq, xk, xv))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 24, bias=False), nn.Linear(DIM, 24, bias=False)
        self.w2 = nn.Linear(24, DIM, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, position_ids):
        x = self.tok_embeddings(tokens) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss(model, batch):
    logits = model(batch["tokens"], batch["position_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Llama()
    for layer in model.layers:
        layer.attention.cp_group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


def draw(generator):
    batch = {n: torch.randint(VOCAB, (2, SEQ), generator=generator) for n in ("tokens", "labels")}
    return {**batch, "position_ids": torch.arange(SEQ).expand(2, SEQ)}


generator = torch.Generator().manual_seed(108108)
batches = [draw(generator) for _ in range(3)]
arguments = Llama, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
