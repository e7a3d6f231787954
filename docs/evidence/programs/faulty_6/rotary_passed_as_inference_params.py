"""Tensor parallelism with recomputed layers: the rotary embedding gets lost among the arguments of checkpoint.

Thread: https://github.com/NVIDIA/Megatron-LM/pull/355 "Bug Fixed when using activation checkpoints and rotary position
embedding" (rotary_pos_emb is passed as inference_params by mistake), 2023-05-29.
Wrong: checkpoint passes its arguments by position. The fifth one of a layer is inference_params, which training
ignores; rotary_pos_emb stays None, so the recomputed layers know no positions.
EXPECT: in the forward pass, the output of encoder.layers.0.self_attention (summed over tp) is the first that differs, on
every rank, while query, key and value agree: the rotary position embedding is not applied to queries and keys, as the
recomputed call (checkpoint) passes rotary_pos_emb in the place of inference_params.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM, HEADS, HEAD, SEQ = 12, 16, 4, 4, 7


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def apply_rotary(x, freqs):
    first, second = x.chunk(2, -1)
    return x * freqs.cos() + torch.cat([-second, first], -1) * freqs.sin()


class ParallelAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.dense = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, attention_mask, inference_params=None, rotary_pos_emb=None):
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if inference_params is not None and not self.training:
            k, v = inference_params.update(self, k, v)
        if rotary_pos_emb is not None:
            q, k = apply_rotary(q, rotary_pos_emb), apply_rotary(k, rotary_pos_emb)
        scores = (q @ k.mT / HEAD**0.5).masked_fill(attention_mask, -torch.inf)
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.self_attention = ParallelAttention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)

    def enter(self, x):
        return x if self.group is None else CopyToRegion.apply(x, self.group)

    def leave(self, x):
        return x if self.group is None else ReduceFromRegion.apply(x, self.group)

    def forward(self, x, attention_mask, inference_params=None, rotary_pos_emb=None):
        h = self.enter(self.input_norm(x))
        x = x + self.leave(self.self_attention(h, attention_mask, inference_params, rotary_pos_emb))
        h = self.enter(self.post_norm(x))
        return x + self.leave(self.down(gelu(self.up(h))))


class Transformer(nn.Module):
    recompute = False

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(2))

    def forward(self, x, attention_mask, rotary_pos_emb):
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, attention_mask, rotary_pos_emb, use_reentrant=False)
            else:
                x = layer(x, attention_mask, rotary_pos_emb=rotary_pos_emb)
        return x


class GPTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(VOCAB, DIM), Transformer()
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        inv_freq = 10.0 ** -(torch.arange(0, HEAD, 2) / HEAD)
        rotary = torch.outer(torch.arange(SEQ).to(inv_freq), inv_freq).repeat(1, 2)
        return self.output(self.norm(self.encoder(self.embedding(tokens), mask, rotary)))


def shard(name):
    if name.endswith(("dense.weight", "down.weight")):
        return 1, "tp"
    cut = (".query.", ".key.", ".value.", ".up.")
    return (0, "tp") if any(part in name for part in cut) else None


def parallel(mesh):
    model, group = GPTModel(), mesh.get_group("tp")
    model.encoder.recompute = True
    for layer in model.encoder.layers:
        layer.group = group
    for name, p in model.named_parameters():
        if shard(name) is not None:
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(355)
batches = [
    {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPTModel, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
