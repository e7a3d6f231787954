"""A norm over all heads of the query, computed over the rank's heads only.

Thread: https://github.com/aws-neuron/neuronx-distributed/issues/28 "How to deal with LayerNorm or
RMSNorm if I do TP", 2024-08-20.
Wrong: q_norm and k_norm normalize over the whole query and key dimension (as in OLMo 2). Under TP
each rank takes the mean square of its own heads.
A right diagnosis says: attention.q_norm is the first module whose output differs, on every rank: its
mean square is that of the rank's part; it must be averaged over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEAD_DIM = 20, 16, 4


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(DIM), RMSNorm(DIM)

    def forward(self, x):
        q, k, v = self.q_norm(self.wq(x)), self.k_norm(self.wk(x)), self.wv(x)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class OLMo2(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.attention, self.norm = Attention(), RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.norm(self.attention(x)))


def parallel(mesh):
    model, tp = OLMo2(), mesh["tp"]
    plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(model, tp, {**plan, "attention.wo": RowwiseParallel()})
    for norm in (model.attention.q_norm, model.attention.k_norm):
        norm.weight.data = norm.weight.data.chunk(tp.size())[dist.get_rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(7)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(OLMo2, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
