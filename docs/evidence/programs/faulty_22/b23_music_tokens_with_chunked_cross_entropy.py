"""A music token decoder, tensor parallel by parallelize_module; the cross-entropy is computed in chunks of time to save
memory.

Thread: pytorch/torchtitan pull request #3412 "[loss] Fix ChunkedCELoss + TP gradient placement mismatch" (2026): the
accumulator labels the buffer of the chunks' gradients with the activations' placement (Replicate), though each chunk's
gradient is Partial.
Fault: ChunkedCrossEntropy.backward collects the local values of the chunks' gradients, which are Partial sums on the tp
axis since the head is cut by words, and calls them Replicate; the decoder below goes back from every rank's own part of
the gradient.
REPAIR: `placements = hidden.placements` -> `placements = grads[0].placements`
A right first sentence says: the gradient of the hidden states, accumulated over the chunks, is a partial sum of each
rank's words but is declared replicated, so it isn't all-reduced over tp; all parameters below the head get wrong
gradients, the head's are right.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import titanlite

CODES, WIDTH, HEAD_DIM, HIDDEN, LENGTH, LAYERS, CHUNKS = 32, 16, 4, 32, 12, 2, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
            nn.Linear(WIDTH, HIDDEN),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """The sum of two codebooks' embeddings goes in; the codes of the first are predicted."""

    def __init__(self):
        super().__init__()
        self.coarse, self.fine = nn.Embedding(CODES, WIDTH), nn.Embedding(CODES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, codes):
        x = self.coarse(codes[:, 0]) + self.fine(codes[:, 1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class MusicModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.head = Decoder(), nn.Linear(WIDTH, CODES, bias=False)


class ChunkedCrossEntropy:
    """Holds the logits of one chunk at a time; the decoder's backward pass runs once, after all chunks."""

    def __init__(self, head, chunks):
        self.head, self.chunks = head, chunks

    def backward(self, hidden, targets):
        leaf = hidden.detach()
        total, grads = 0.0, []
        for part, labels in zip(leaf.chunk(self.chunks, dim=1), targets.chunk(self.chunks, dim=1)):
            part = part.detach().requires_grad_()
            with loss_parallel():
                logits = self.head(part)
                value = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                value = value / targets.numel()
                value.backward()
            total = total + value.detach().full_tensor()
            grads.append(part.grad)
        placements = hidden.placements
        buffer = torch.cat([grad.to_local() for grad in grads], dim=1)
        hidden.backward(DTensor.from_local(buffer, hidden.device_mesh, placements))
        return total


def parallelize(model, mesh):
    plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    for block in model.decoder.blocks:
        parallelize_module(block, mesh, plan)
    top = {
        "decoder": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        ),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, top)


def plain():
    return MusicModel()


def parallel(mesh):
    model = parallelize(MusicModel(), mesh["tp"])
    return model, ChunkedCrossEntropy(model.head, CHUNKS)


def loss(model, batch):
    codes, targets = batch
    return F.cross_entropy(model.head(model.decoder(codes)).flatten(0, 1), targets.flatten())


def step(built, batch):
    model, criterion = built
    codes, targets = batch
    return criterion.backward(model.decoder(codes), targets)


generator = torch.Generator().manual_seed(3412)


def clips(rows=4):
    codes = torch.randint(0, CODES, (rows, 2, LENGTH + 1), generator=generator)
    return codes[..., :-1].contiguous(), codes[:, 0, 1:].contiguous()


batches = [clips() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
