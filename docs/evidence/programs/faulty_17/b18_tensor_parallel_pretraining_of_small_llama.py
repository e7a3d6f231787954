"""Pretraining of a small Llama whose output head shares the embedding: parallelize_module and two data parallel replicas.

Thread: axolotl-ai-cloud/axolotl pull request #2999 "Add validation for TP with models with tied embeddings" (2025): "Tensor
Parallelism doesn't work with models with tied embeddings"; also pytorch/pytorch pull request #116475, whose test ties the weights
by an assignment after they became DTensors.
Fault: in parallel, parallelize_module gives tok_embeddings and output a new parameter each, so the tie made in Llama.__init__ is
lost: the two matrices get separate gradients and drift apart.
REPAIR: `model = parallelize_module(model, mesh["tp"], tp_plan(model))` -> `model = parallelize_module(model, mesh["tp"], tp_plan(model)).tie_weights()`
A right first sentence says: the embedding and the output head are tied in the plain model but two separate parameters after
parallelize_module, so the embedding lacks the gradient of the head (and the other way round) and the copies drift apart.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite


@dataclass
class Config:
    vocab: int = 24
    dim: int = 16
    heads: int = 4
    hidden: int = 32
    layers: int = 2
    length: int = 8
    theta: float = 100.0

    @property
    def head_dim(self):
        return self.dim // self.heads


def rotary_table(config):
    rates = config.theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(config.length), rates).double()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, table):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[: x.size(-2)]).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(config.dim, config.dim, bias=False) for _ in range(4)
        )

    def forward(self, x, table):
        b, t, _ = x.shape
        q, k, v = (
            w(x).view(b, t, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.dim, config.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)

    def forward(self, x, table):
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self.register_buffer("table", rotary_table(config), persistent=False)
        nn.init.normal_(self.tok_embeddings.weight, std=0.3)
        self.tie_weights()

    def tie_weights(self):
        self.output.weight = self.tok_embeddings.weight
        return self

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.output(self.norm(x))


def tp_plan(model):
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(model.layers)):
        for name in (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "feed_forward.w1",
            "feed_forward.w3",
        ):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    return plan


def average_over(group, tensors):
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        dist.all_reduce(local, group=group)
        local /= dist.get_world_size(group)


def plain():
    return Llama(Config())


def parallel(mesh):
    model = Llama(Config())
    model = parallelize_module(model, mesh["tp"], tp_plan(model))
    return model, mesh.get_group("dp")


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step(built, tokens):
    model, dp_group = built
    value = loss(model, tokens)
    value.backward()
    logged = value.detach().clone()
    average_over(dp_group, [p.grad for p in model.parameters()] + [logged])
    return logged


generator = torch.Generator().manual_seed(2999)
batches = [
    torch.randint(0, Config.vocab, (4, Config.length + 1), generator=generator) for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(
        parameters, lr=3e-3, betas=(0.9, 0.95), foreach=False
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
