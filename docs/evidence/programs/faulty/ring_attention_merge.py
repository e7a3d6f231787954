"""Ring attention whose merge of the blocks forgets to rescale the denominator.

Thread: https://github.com/gpu-mode/ring-attention/issues/6 "Bug in DummyRingAttentionImpl.ipynb (delta
too high)", 2024-02-21.
Wrong: when the running maximum grows, the accumulated output is rescaled, but the accumulated
denominator is not.
A right diagnosis says: layers.0.attention.inner (ring attention) is the first module whose output
differs.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS = 20, 16, 2


class Inner(nn.Module):
    group = None

    def forward(self, q, k, v):  # [B, H, S, D], not causal
        blocks = [(k, v)]
        if self.group is not None:
            keys, values = dist_nn.all_gather(k, self.group), dist_nn.all_gather(v, self.group)
            n, rank = len(keys), dist.get_rank(self.group)
            blocks = [(keys[(rank - i) % n], values[(rank - i) % n]) for i in range(n)]
        out = torch.zeros_like(q)
        peak = torch.full_like(q[..., :1], -torch.inf)
        denominator = torch.zeros_like(peak)
        for k, v in blocks:
            scores = q @ k.transpose(-2, -1) * 3 / q.shape[-1] ** 0.5
            new_peak = torch.maximum(peak, scores.max(-1, keepdim=True).values)
            weights = (scores - new_peak).exp()
            out = out * (peak - new_peak).exp() + weights @ v
            denominator = denominator + weights.sum(-1, keepdim=True)
            peak = new_peak
        return out / denominator


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.inner, self.wo = nn.Linear(DIM, 3 * DIM), Inner(), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous()
            for t in self.qkv(x).chunk(3, -1)
        )
        return self.wo(self.inner(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def parallel(mesh):
    model = Model()
    for layer in model.layers:
        layer.attention.inner.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(7)
batches = [
    {name: torch.randint(VOCAB, (3, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(Model, parallel, **options))
