"""A T5 encoder as a pipeline by hand: the first layer makes the relative position bias that all layers use.

Thread: huggingface/transformers issue #13397 "T5: relative position embeddings" (2021): "The `has_relative_attention_bias`
specifies which layer should store the embedding, which is the first layer in T5. Then the `position_bias` is computed in the
first layer and shared with all other layers." Of the kind of splitting such a model into stages.
Fault: the first stage sends its hidden states only (PASSED_ON), so the layers of the second stage find no position bias and
take zeros for it.
REPAIR: `PASSED_ON = 1` -> `PASSED_ON = 2`
A right first sentence says: on stage 1 (rank 1), the output of the attention of its first layer (block.2.attention) is wrong
from step 1 on, its hidden states agree: the position bias of the first layer does not reach the second stage, whose layers
use zeros; the gradient of relative_attention_bias lacks their part.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu

import titanlite

VOCAB, DIM, HEADS, LENGTH, LAYERS, MICROBATCHES, ROWS = 12, 8, 2, 6, 4, 2, 6
PASSED_ON = 1


class Attention(nn.Module):
    def __init__(self, has_relative_attention_bias):
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.has_relative_attention_bias = has_relative_attention_bias
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(2 * LENGTH - 1, HEADS)

    def compute_bias(self):
        position = torch.arange(LENGTH)
        distance = position - position[:, None] + LENGTH - 1
        return self.relative_attention_bias(distance).permute(2, 0, 1)

    def forward(self, x, position_bias=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        if position_bias is None:
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias()
            else:
                position_bias = scores.new_zeros(HEADS, LENGTH, LENGTH)
        out = (scores + position_bias).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2)), position_bias


class Layer(nn.Module):
    def __init__(self, has_relative_attention_bias):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(has_relative_attention_bias)
        self.wi, self.wo = nn.Linear(DIM, 16, bias=False), nn.Linear(16, DIM, bias=False)

    def forward(self, x, position_bias):
        y, position_bias = self.attention(self.norm1(x), position_bias)
        x = x + y
        return x + self.wo(relu(self.wi(self.norm2(x)))), position_bias


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.block = nn.ModuleDict({str(i): Layer(i == 0) for i in range(LAYERS)})
        self.final_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.classify = nn.Linear(DIM, VOCAB)

    def forward(self, x, position_bias=None):
        x = x if self.shared is None else self.shared(x)
        for layer in self.block.values():
            x, position_bias = layer(x, position_bias)
        if self.classify is None:
            return x, position_bias
        return self.classify(self.final_norm(x))


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    encoder, index = Encoder(), mesh.get_local_rank("pp")
    half = LAYERS // 2
    mine = range(index * half, (index + 1) * half)
    encoder.block = nn.ModuleDict({str(i): encoder.block[str(i)] for i in mine})
    if index == 0:
        encoder.final_norm = encoder.classify = None
    else:
        encoder.shared = None
    return encoder


def step(stage, batch):
    first = dist.get_rank() == 0
    shapes = [(ROWS // MICROBATCHES, LENGTH, DIM), (HEADS, LENGTH, LENGTH)][:PASSED_ON]
    kept, total = [], 0
    for tokens in batch["tokens"].chunk(MICROBATCHES):
        if first:
            outputs = stage(tokens)[:PASSED_ON]
            for t in outputs:
                dist.send(t.detach().contiguous(), 1)
            kept.append(outputs)
        else:
            inputs = [torch.empty(shape) for shape in shapes]
            for t in inputs:
                dist.recv(t, 0)
            kept.append([t.requires_grad_() for t in inputs])
    for tensors, labels in zip(kept, batch["labels"].chunk(MICROBATCHES)):
        if first:
            grads = [torch.empty(t.shape) for t in tensors]
            for grad in grads:
                dist.recv(grad, 1)
            torch.autograd.backward(tensors, grads)
        else:
            value = criterion(stage(*tensors), labels) / MICROBATCHES
            value.backward()
            total += value.detach()
            for t in tensors:
                dist.send(t.grad, 0)
    return None if first else total


rng = torch.Generator().manual_seed(403)
batches = []
for _ in range(3):
    tokens, labels = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=rng)
    batches.append({"tokens": tokens, "labels": labels})
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
