"""Sentence classification in three languages: a shared encoder and a head per language under FSDP2.

Thread: pytorch/pytorch issue #158719 "FSDP Fails when parameters are used differently across ranks" (2025), with pull
request #174862 "[FSDP2] Fix to differing gradient computation graphs in different ranks" (2026): the group's
post-backward collects only the parameters that have a gradient and reduces them as one buffer; where the shapes are
equal on the ranks, nothing hangs.
Fault: LanguageTrainer.training_step begins with another language on each rank, so one reduce-scatter of the root's
parameters adds the gradient of one rank's head to the gradient of another language's head on the other rank.
REPAIR: `order = LANGUAGES[self.rank :] + LANGUAGES[: self.rank]` -> `order = LANGUAGES`
A right first sentence says: each rank goes through the languages in an order of its own, so in one backward pass the
ranks have gradients for different heads, and FSDP2's reduce-scatter mixes them up; the gradients of the heads are
wrong, those of the encoder and the embedding are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

WORDS, PAD, WIDTH, HEADS, LENGTH, LAYERS, CLASSES, ROWS = 40, 0, 16, 4, 9, 2, 4, 6
LANGUAGES = ("german", "french", "polish")


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class SentenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES) for name in LANGUAGES})

    def forward(self, tokens, language):
        mask = tokens != PAD
        x = self.words(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x) * mask.unsqueeze(-1)
        return self.heads[language](x.sum(1) / mask.sum(1, keepdim=True))


class LanguageTrainer:
    """One forward and backward pass per language; gradients add up over the languages."""

    def __init__(self, model, mesh):
        self.model, self.group = model, mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def training_step(self, batch):
        # Ranks start with different languages, so that long sentences of one don't meet in a step.
        order = LANGUAGES[self.rank :] + LANGUAGES[: self.rank]
        total = 0.0
        for language in order:
            tokens, labels = batch[language]
            value = F.cross_entropy(self.model(tokens, language), labels) / len(LANGUAGES)
            value.backward()
            total = total + value.detach()
        dist.all_reduce(total, group=self.group)
        return total / self.ranks


def plain():
    return SentenceClassifier()


def parallel(mesh):
    model = SentenceClassifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, LanguageTrainer(model, mesh["dp"])


def loss(model, batch):
    losses = [F.cross_entropy(model(batch[name][0], name), batch[name][1]) for name in LANGUAGES]
    return torch.stack(losses).mean()


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(158719)


def sentences():
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return tokens * (torch.arange(LENGTH) < lengths), labels


batches = [{name: sentences() for name in LANGUAGES} for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
