"""A Llama-like decoder under parallelize_module, trained on answers with a bonus for the entropy of its predictions.

Thread: pytorch/pytorch issue #190746 "loss_parallel() gives identity gradients to any log_softmax not consumed by cross_entropy"
(2026): inside the context, the backward of a vocabulary-sharded log_softmax passes its gradient on as it is.
Fault: Trainer.entropy takes the log_softmax of the sharded logits inside loss_parallel(), whose backward leaves out the softmax
term for everything but the cross entropy; the value is right, the gradient of the bonus isn't.
REPAIR: `logprobs = logits.log_softmax(-1)` -> `logprobs = logits.full_tensor().log_softmax(-1)`
A right first sentence says: the entropy's log_softmax of the vocabulary-sharded logits runs inside loss_parallel(), where the
backward of log_softmax is the identity and is right for cross_entropy only, so the gradient of the logits is wrong.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import titanlite

VOCAB, WIDTH, HEAD_DIM, HIDDEN, LENGTH, LAYERS, BONUS = 24, 16, 4, 32, 8, 2, 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (
            w(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def tensor_parallel(model, mesh):
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("wq", "wk", "wv", "gate", "up")}
    plan |= {"blocks.*.wo": RowwiseParallel(), "blocks.*.down": RowwiseParallel()}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    plan["output"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


class Trainer:
    def __init__(self, model):
        self.model = model

    def entropy(self, logits):
        logprobs = logits.log_softmax(-1)
        return whole(-(logprobs.exp() * logprobs).sum(-1).mean())

    def training_step(self, tokens, labels):
        with loss_parallel():
            logits = self.model(tokens)
            nll = whole(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            objective = nll - BONUS * self.entropy(logits)
            objective.backward()
        return objective.detach()


def plain():
    return Decoder()


def parallel(mesh):
    model = tensor_parallel(Decoder(), mesh["tp"])
    return model, Trainer(model)


def loss(model, batch):
    tokens, labels = batch
    logits = model(tokens)
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    logprobs = F.log_softmax(logits, -1)
    return nll + BONUS * (logprobs.exp() * logprobs).sum(-1).mean()


def step(built, batch):
    return built[1].training_step(*batch)


generator = torch.Generator().manual_seed(190746)


def answers(rows=4):
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


batches = [answers() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
