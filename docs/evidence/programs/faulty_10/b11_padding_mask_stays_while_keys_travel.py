"""Ring attention in a bidirectional encoder: keys and values go round, the padding mask does not.

Thread: of the kind deepspeedai/DeepSpeed pull request #4493 "gather attention mask" (2023): with the sequence cut, each rank
has the mask of its own part only.
Fault: in RingAttention.forward, the received keys are masked by the rank's own mask.
REPAIR: `k, v = shift(k, self.group), shift(v, self.group)` -> `k, v, bias = (shift(t, self.group) for t in (k, v, bias))`
Expected: the output of the first ring attention (layers.0.attention) is wrong on both ranks from the forward pass of step 1
on, its input, q, k and v agree: the keys that come from the other rank are masked by the padding mask of the rank's own
keys, as the mask does not travel with k and v.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, HEADS, LENGTH, PAD = 12, 8, 2, 8, 0


class Shift(torch.autograd.Function):
    """To the next rank; the gradient goes to the previous one."""

    @staticmethod
    def exchange(x, group, by):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        target, source = (rank + by) % size, (rank - by) % size
        operations = [
            dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=target),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return received

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return Shift.exchange(x, group, 1)

    @staticmethod
    def backward(ctx, gradient):
        return Shift.exchange(gradient, ctx.group, -1), None


shift = Shift.apply


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def attend(self, q, k, v, bias):
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v

    def forward(self, x, padding):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        bias = -1e4 * padding[:, None, None].to(x.dtype)
        return self.out(self.attend(q, k, v, bias).transpose(1, 2).flatten(2))


class RingAttention(Attention):
    def attend(self, q, k, v, bias):
        size = dist.get_world_size(self.group)
        top, total, out = torch.full((*q.shape[:-1], 1), -torch.inf), 0.0, 0.0
        for hop in range(size):
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
            new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            p, old = (scores - new_top).exp(), (top - new_top).exp()
            total, out, top = total * old + p.sum(-1, keepdim=True), out * old + p @ v, new_top
            if hop < size - 1:
                k, v = shift(k, self.group), shift(v, self.group)
        return out / total


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(DIM), Attention(), nn.Linear(DIM, DIM)

    def forward(self, x, padding):
        x = x + self.attention(self.norm(x), padding)
        return x + gelu(self.mlp(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.Linear(DIM, VOCAB)

    def forward(self, words, positions):
        x = self.words(words) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, words == PAD)
        return self.decoder(x)


def loss(model, batch):
    """Masked language modeling: the mean over the masked words."""
    logits = model(batch["words"], batch["positions"]).flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)


def parallel(mesh):
    model = Encoder()
    for layer in model.layers:
        layer.attention.__class__, layer.attention.group = RingAttention, mesh.get_group("cp")
    return model


def step(model, batch):
    masked = (batch["labels"] != -100).sum()
    dist.all_reduce(masked)
    logits = model(batch["words"], batch["positions"]).flatten(0, 1)
    value = cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    (value / masked).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value / masked


rng = torch.Generator().manual_seed(313)


def draw():
    labels = torch.randint(2, VOCAB, (4, LENGTH), generator=rng)
    hidden = torch.rand(4, LENGTH, generator=rng) < 0.4
    padding = torch.arange(LENGTH) >= torch.tensor([[8], [6], [3], [5]])
    return {
        "words": labels.masked_fill(hidden, 1).masked_fill(padding, PAD),
        "labels": labels.masked_fill(~hidden | padding, -100),
        "positions": torch.arange(LENGTH).repeat(4, 1),
    }


batches = [draw() for _ in range(3)]
arguments = Encoder, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
