"""A code model whose embedding and head are one weight, by parallelize_module with a loss on vocabulary shards.

Thread: facebookresearch/fairseq2 issue #1380 "Support tensor parallel tied embedding/project", and
deepspeedai/DeepSpeed pull request #8582 "[AutoTP] Implement VocabParallelEmbedding and enhance tied model support"
(2026): both sides of the tie have to be cut over the vocabulary and share the shard.
What could be accused: parallelize_module makes two DTensors of the tied weight, so the tie is broken for a moment, and
tie_weights assigns the embedding's parameter to the head afterwards; this is the place for it, since RowwiseParallel
and ColwiseParallel cut both along the vocabulary, the same rows lie on the same rank, and the gradients of both uses
add up in the one shard without a further sum over tp.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import titanlite

WORDS, WIDTH, HEADS, LAYERS, LENGTH, ROWS, PASSES = 20, 16, 4, 2, 8, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 28, bias=False) for _ in range(2))
        self.down = nn.Linear(28, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class CodeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=WIDTH**-0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain():
    return CodeModel()


def parallel(mesh):
    tp, model = mesh["tp"], CodeModel()
    gathered = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(**gathered),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(block, tp, plan)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, tp, {"words": words, "norm": SequenceParallel(), "head": head})
    model.tie_weights()
    return model


def loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def step(model, batch):
    value = 0.0
    for tokens, targets in zip(batch["tokens"].chunk(PASSES), batch["targets"].chunk(PASSES)):
        with loss_parallel():
            part = loss(model, {"tokens": tokens, "targets": targets}) / PASSES
            part.backward()
        value = value + part.detach().full_tensor()
    return value


def clip(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


generator = torch.Generator().manual_seed(1380)


def lines():
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


batches = [lines() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 2}, clip=clip)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
