"""torchtitan's plan with sequence parallelism and loss parallelism: the output layer reads Shard(1).

Thread: https://github.com/pytorch/torchtitan/issues/1093 "why is shard(1) in the colwiseparallel for lm
head?", 2025-04-11.
Right: input_layouts describes what comes in; ColwiseParallel gathers the sequence before the matrix
product, and its output is sharded over the vocabulary only. The loss is computed of the shards.
Must not be accused: logits that are a part of the vocabulary, norms on sequence shards, a backward pass
inside loss_parallel().
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import titanlite

DIM, HEAD_DIM, VOCAB = 16, 4, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 32, bias=False), nn.Linear(DIM, 32, bias=False)
        self.w2 = nn.Linear(32, DIM, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def apply_tp(mesh):
    gather = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    output = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    )
    model = Transformer()
    plan = {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**gather),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    return model


def loss_fn(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def step(model, batch):
    with loss_parallel():
        loss = loss_fn(model, batch)
        loss.backward()
    return loss


generator = torch.Generator().manual_seed(49)
batches = [
    {name: torch.randint(VOCAB, (2, 6), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss_fn, ranks={"tp": 2}, step=step)
    print(titanlite.compare(Transformer, apply_tp, **options))
