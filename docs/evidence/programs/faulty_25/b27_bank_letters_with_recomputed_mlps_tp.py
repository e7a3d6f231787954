"""A language model of bank letters under tensor and sequence parallelism, which recomputes its feed-forward layers.

Thread: pytorch/torchtitan issue #1554 "The ordering of fsdp, ac, tp, pp and complie etc." (2025; TP goes before AC),
and NVIDIA-NeMo/Automodel pull request #1974 (2026), a plan whose keys match no module: "TP is configured but never
applied".
Fault: parallel runs apply_ac before apply_tp. Inside the checkpoint wrapper the feed-forward's layers have other names,
so the plan's keys blocks.*.feed_forward.fc1 and fc2 match nothing (a warning); these stay plain replicas that work on
each rank's part of the sequence, right forward, but nothing sums their weights' gradients over tp.
REPAIR: `for apply in (apply_ac, apply_tp):` -> `for apply in (apply_tp, apply_ac):`
A right first sentence says: the gradients of blocks.*.feed_forward.fc1 and fc2 are those of the rank's own part of the
sequence and must be summed over tp: these two weren't parallelized (the checkpoint wrapper hides them from the plan).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import titanlite

VOCABULARY, WIDTH, HEAD_DIM, LENGTH, ROWS = 32, 16, 4, 12, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class LetterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.size(1)).unsqueeze(0)
        x = self.tok_embeddings(tokens) + self.pos_embeddings(places)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def apply_tp(model, tp_mesh):
    norm = SequenceParallel(use_local_output=True)
    embedding = dict(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {
        "tok_embeddings": RowwiseParallel(**embedding),
        "pos_embeddings": RowwiseParallel(**embedding),
        "blocks.*.attention_norm": norm,
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.ffn_norm": norm,
        "blocks.*.feed_forward.fc1": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.feed_forward.fc2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": norm,
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp_mesh, plan)


def apply_ac(model, tp_mesh):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, FeedForward))


def plain():
    return LetterModel()


def parallel(mesh):
    model = LetterModel()
    for apply in (apply_ac, apply_tp):
        apply(model, mesh["tp"])
    return model


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


generator = torch.Generator().manual_seed(1554)


def letters():
    start = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 5, (ROWS, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.rand(ROWS, LENGTH + 1, generator=generator) < 0.1
    return {"tokens": tokens.masked_fill(noise, 0)}


batches = [letters() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    rename=lambda name: name.replace("_checkpoint_wrapped_module.", ""),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
