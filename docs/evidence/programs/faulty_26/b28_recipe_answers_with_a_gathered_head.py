"""Instruction tuning of a small decoder under FSDP2, whose loss takes the head's weight and never makes the logits.

Thread: meta-pytorch/torchtune pull request #2507 "Linear Cross Entropy" (2025): cut_cross_entropy fails on the
sharded weight of the output layer, 'this is "fixed" by calling full_tensor on the output module, i.e.
output.weight.full_tensor()' (apple/ml-cross-entropy issue #31).
Fault: LinearCrossEntropy.forward calls full_tensor() on the DTensor head.weight. Its backward pass takes the gradient
as replicated, so each rank keeps its rows of its own batch's gradient; FSDP doesn't reduce it, since head.forward
never runs. All other gradients are summed over dp.
REPAIR: `weight.full_tensor()` -> `weight.full_tensor(grad_placements=[torch.distributed.tensor.Partial()])`
A right first sentence says: the gradient of head.weight is not summed over dp: full_tensor() in the loss treats each
rank's own gradient as replicated (grad_placements is missing), so each shard has the gradient of one rank's tokens
only.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import titanlite

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, IGNORED = 26, 16, 2, 10, 8, -100


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn = SelfAttention()
        self.w1, self.w3 = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.w2 = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attn(self.sa_norm(x))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    """Returns hidden states; the loss applies the head."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LinearCrossEntropy(nn.Module):
    """The sum over the targets, a chunk of tokens at a time."""

    def __init__(self, num_output_chunks=4):
        super().__init__()
        self.num_output_chunks = num_output_chunks

    def forward(self, weight, hidden, labels):
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        keep = labels != IGNORED
        hidden, labels = hidden[keep], labels[keep]
        total = hidden.new_zeros(())
        for h, y in zip(
            hidden.tensor_split(self.num_output_chunks), labels.tensor_split(self.num_output_chunks)
        ):
            logits = F.linear(h, weight)
            total = total + (logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1))[:, 0]).sum()
        return total


loss_fn = LinearCrossEntropy()


def plain():
    return Decoder()


def parallel(mesh):
    model = Decoder()
    for module in (*model.layers, model.head, model):
        fully_shard(module, mesh=mesh["dp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model, mesh["dp"].get_group()


def loss(model, batch):
    value = loss_fn(model.head.weight, model(batch["tokens"]), batch["labels"])
    return value / (batch["labels"] != IGNORED).sum()


def step(built, batch):
    model, group = built
    num_tokens = (batch["labels"] != IGNORED).sum()
    dist.all_reduce(num_tokens, group=group)
    hidden = model(batch["tokens"])
    value = loss_fn(model.head.weight, hidden, batch["labels"]) / num_tokens
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


generator = torch.Generator().manual_seed(2507)


def answers():
    text = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    prompt = torch.randint(1, 7, (ROWS, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompt, IGNORED)
    return {"tokens": text[:, :-1].contiguous(), "labels": labels}


batches = [answers() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
