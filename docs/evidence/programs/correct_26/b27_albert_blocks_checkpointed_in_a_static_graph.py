"""An ALBERT for products whose one layer is passed three times, checkpointed with reentrant backward, under static DDP.

Thread: pytorch/pytorch pull request #55248 "enable static graph training in DDP" (2021), and lucidrains/DALLE2-pytorch
issue #225 "gradient checkpointing needs static graph" (2022): "Reused parameters in multiple reentrant backward
passes".
What could be accused: the shared layer's gradients are ready three times in one backward pass, DDP starts no reduction
in the first step before the whole backward pass has ended, and the bias that is used belongs to a module that is never
called; but a static graph counts the three and reduces after the third, the bias is a parameter like any other, and
each row has two masked places, so that the mean over the ranks is the mean over all.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import titanlite

WORDS, FACTOR, WIDTH, HEADS, DEPTH, LENGTH, ROWS, MASK = 24, 6, 16, 2, 3, 8, 8, 23


class SharedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = self.norm1(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Albert(nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.words, self.places = nn.Embedding(WORDS, FACTOR), nn.Embedding(LENGTH, FACTOR)
        self.widen, self.narrow = nn.Linear(FACTOR, WIDTH), nn.Linear(WIDTH, FACTOR)
        self.layer, self.norm = SharedLayer(), nn.LayerNorm(FACTOR)
        self.decoder = nn.Linear(FACTOR, WORDS)
        self.decoder.weight = self.words.weight
        self.relation = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x = self.widen(self.words(tokens) + self.places.weight)
        for _ in range(DEPTH):
            if self.checkpointing:
                x = checkpoint(self.layer, x, use_reentrant=True)
            else:
                x = self.layer(x)
        y = self.norm(F.gelu(self.narrow(x)))
        logits = F.linear(y, self.words.weight) + self.decoder.bias
        return logits, self.relation(x[:, 0])


def plain():
    return Albert()


def parallel(mesh):
    return DistributedDataParallel(
        Albert(checkpointing=True),
        process_group=mesh.get_group("dp"),
        static_graph=True,
        gradient_as_bucket_view=True,
        bucket_cap_mb=0.01,
    )


def loss(model, batch):
    tokens, masked = batch["tokens"], batch["masked"]
    logits, relation = model(tokens.masked_fill(masked, MASK))
    words = F.cross_entropy(logits[masked], tokens[masked])
    return words + 0.5 * F.cross_entropy(relation, batch["swapped"])


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


generator = torch.Generator().manual_seed(55248)


def products():
    tokens = torch.randint(0, MASK, (ROWS, LENGTH), generator=generator)
    places = torch.rand(ROWS, LENGTH, generator=generator).argsort(1)
    swapped = torch.randint(0, 2, (ROWS,), generator=generator)
    return {"tokens": tokens, "masked": places < 2, "swapped": swapped}


batches = [products() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
