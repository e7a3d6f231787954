"""Paraphrase training of an MPNet sentence encoder under DDP with the mega-batch margin loss, in mini-batches.

Thread: huggingface/sentence-transformers pull request #3854 "Fix MegaBatchMarginLoss forward_mini_batched: KeyError
crash and dropped gradients" (2026): the backward pass of each mini-batch but the last stands behind a condition which
compares with the number of rows of the mini-batch's scores, so it never runs.
Fault: MegaBatchMarginLoss.backward goes back early only where `end < len(scores)`; scores has a row per anchor of the
mini-batch, so this is never true and all mini-batches but the last leave no gradient, though their losses count.
REPAIR: `if end < len(scores):` -> `if end < len(anchors):`
A right first sentence says: in the mini-batched margin loss the backward pass is skipped for all mini-batches except
the last, as the condition uses the length of the mini-batch's score matrix instead of the number of anchors; gradients
of the encoder lack these terms while the reported loss is right.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import MPNetConfig, MPNetModel

import titanlite

VOCAB, PAD, LENGTH, PAIRS, MINI_BATCH = 30, 1, 8, 12, 2
POSITIVE_MARGIN, NEGATIVE_MARGIN = 0.95, 0.2


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        config = MPNetConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=16,
            initializer_range=0.2,
        )
        self.mpnet = MPNetModel(config, add_pooling_layer=False)

    def forward(self, input_ids):
        mask = (input_ids != PAD).long()
        hidden = self.mpnet(input_ids=input_ids, attention_mask=mask).last_hidden_state
        mask = mask.unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def margin_loss(anchors, positives, negatives):
    near, far = (anchors * positives).sum(-1), (anchors * negatives).sum(-1)
    return F.relu(POSITIVE_MARGIN - near) + F.relu(far - NEGATIVE_MARGIN)


def hardest(scores, own):
    """For each row, the best column apart from its own."""
    return scores.scatter(1, own.unsqueeze(1), -2.0).argmax(1)


class MegaBatchMarginLoss:
    """A mini-batch of anchors at a time looks for negatives among the positives of all ranks."""

    def __init__(self, encoder, mesh, mini_batch):
        self.encoder, self.mini_batch = encoder, mini_batch
        self.group, self.rank, self.ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()

    def all_positives(self, positives):
        parts = [torch.empty_like(positives) for _ in range(self.ranks)]
        dist.all_gather(parts, positives.contiguous(), group=self.group)
        return torch.cat(parts)

    def backward(self, anchors, positives):
        everywhere = self.all_positives(positives)
        with torch.no_grad():
            candidates = self.encoder.module(everywhere)
        total = torch.zeros(())
        for begin in range(0, len(anchors), self.mini_batch):
            end = begin + self.mini_batch
            own = self.rank * len(anchors) + torch.arange(begin, end)
            with self.encoder.no_sync() if end < len(anchors) else nullcontext():
                with torch.no_grad():
                    scores = self.encoder.module(anchors[begin:end]) @ candidates.T
                texts = anchors[begin:end], everywhere[own], everywhere[hardest(scores, own)]
                terms = margin_loss(*self.encoder(torch.cat(texts)).chunk(3))
                value = terms.sum() / len(anchors)
                total = total + value.detach()
                if end < len(scores):
                    value.backward()
        value.backward()
        return total


class ParaphraseTrainer:
    def __init__(self, encoder, mesh):
        self.encoder = DistributedDataParallel(encoder, process_group=mesh.get_group())
        self.criterion = MegaBatchMarginLoss(self.encoder, mesh, MINI_BATCH)

    def training_step(self, batch):
        value = self.criterion.backward(batch["anchors"], batch["positives"])
        dist.all_reduce(value, group=self.criterion.group)
        return value / self.criterion.ranks


def plain():
    return SentenceEncoder()


def parallel(mesh):
    trainer = ParaphraseTrainer(SentenceEncoder(), mesh["dp"])
    return trainer.encoder, trainer


def loss(model, batch):
    anchors, positives = model(batch["anchors"]), model(batch["positives"])
    negatives = hardest((anchors @ positives.T).detach(), torch.arange(PAIRS))
    return margin_loss(anchors, positives, positives[negatives]).mean()


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(3854)


def sentences():
    tokens = torch.randint(2, VOCAB, (PAIRS, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (PAIRS, 1), generator=generator)
    return tokens.masked_fill(torch.arange(LENGTH) >= lengths, PAD)


batches = [{"anchors": sentences(), "positives": sentences()} for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
