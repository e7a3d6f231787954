"""Gradient accumulation that clips after every backward pass.

Thread: https://github.com/huggingface/transformers/issues/1563 "The implementation of grad clipping
is not correct when gradient accumulation is enabled", 2019-10-19.
Wrong: clip_grad_norm_ runs on the partial sum after each microbatch, so early microbatches are
scaled down before later ones are added.
A right diagnosis says: the gradients are a sum of the microbatches' contributions with wrong
coefficients (below one, the first less than the last): they are clipped within the step, before all
microbatches are summed.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

MAX_GRAD_NORM, ACCUMULATION = 0.25, 2


class Bert(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(dim, 3)

    def forward(self, input_ids):
        return self.classifier(self.layer(self.embeddings(input_ids))[:, 0])


def loss_of(model, batch):
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)


def train(model, batch):
    total = 0
    for ids, labels in zip(
        batch["input_ids"].chunk(ACCUMULATION), batch["labels"].chunk(ACCUMULATION)
    ):
        loss = loss_of(model, {"input_ids": ids, "labels": labels}) / ACCUMULATION
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        total += loss.detach()
    return total


def build():
    return DDP(Bert())


generator = torch.Generator().manual_seed(7)
batches = [
    {
        "input_ids": torch.randint(30, (8, 6), generator=generator),
        "labels": torch.randint(3, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Bert,
            build,
            batches=batches,
            loss=loss_of,
            ranks={"dp": 2},
            split="dp",
            step=train,
            clip=clip,
        )
    )
