"""Summed losses under DDP, whose gradients are multiplied by world size / number of tokens.

Thread: https://github.com/facebookresearch/fairseq/issues/494 "Undoing of normalization by world
size?", 2019-02-07.
Right: DDP's average is undone and the sum is divided by the tokens of all ranks, which differ.
Must not be accused: the multiplication by the world size, or a mean of means.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

PAD = -100


class Translator(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, 16, batch_first=True)
        self.output = nn.Linear(16, vocab)

    def forward(self, tokens):
        return self.output(self.rnn(self.embed(tokens))[0])


def criterion(model, batch, reduction="mean"):
    logits = model(batch["source"]).flatten(0, 1)
    return cross_entropy(logits, batch["target"].flatten(), reduction=reduction)


def train_step(model, batch):
    loss = criterion(model, batch, "sum")
    loss.backward()
    stats = torch.stack([(batch["target"] != PAD).sum().to(loss.dtype), loss.detach()])
    dist.all_reduce(stats)
    sample_size, loss = stats
    for p in model.parameters():  # multiply_grads
        p.grad.mul_(dist.get_world_size() / sample_size)
    return loss / sample_size


def build():
    return DDP(Translator())


generator = torch.Generator().manual_seed(11)
batches = []
for _ in range(3):
    source = torch.randint(24, (4, 6), generator=generator)
    target = torch.randint(24, (4, 6), generator=generator)
    target[0, 2:] = PAD
    target[1, 4:] = PAD
    batches.append({"source": source, "target": target})

if __name__ == "__main__":
    options = dict(batches=batches, loss=criterion, ranks={"dp": 2}, split="dp", step=train_step)
    print(titanlite.compare(Translator, build, **options))
