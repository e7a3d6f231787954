"""DPO with the reference's log-probabilities cached in advance, by all ranks together.

Thread: https://github.com/allenai/open-instruct/pull/1182 "Now, we cache logprobs to disk in DPO." (review:
all-reduce can double-count cached logprobs), 2025-12-17.
Wrong: each rank fills in its own samples and the tables are summed. The sampler repeats the first sample to
give both ranks equally many, so its entry is counted twice.
EXPECT: the outputs of all modules agree and the loss is the first that differs: it reads the cached reference
log-probabilities, in which sample 0 is twice the right value (summed over the ranks, both had it); only the
row of sample 0 is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

import titanlite

VOCAB, DIM, SAMPLES, BETA = 12, 10, 7, 0.2
generator = torch.Generator().manual_seed(1182)
chosen = torch.randint(VOCAB, (SAMPLES, 6), generator=generator)
rejected = torch.randint(VOCAB, (SAMPLES, 6), generator=generator)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 20), nn.GELU(), nn.Linear(20, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


def logps(model, tokens):
    logits = model(tokens[:, :-1])
    nll = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -nll.unflatten(0, (len(tokens), -1)).sum(-1)


@torch.no_grad()
def build_reference_logprobs_cache(model, indices):
    cache = torch.zeros(SAMPLES, 2, dtype=torch.float64)
    for index in indices:
        row = slice(index, index + 1)
        cache[index, 0] = logps(model, chosen[row])[0]
        cache[index, 1] = logps(model, rejected[row])[0]
    return cache


def loss(model, batch):
    index = batch["index"]
    ratio = logps(model, chosen[index]) - logps(model, rejected[index])
    reference = model.reference_logps[index, 0] - model.reference_logps[index, 1]
    return -logsigmoid(BETA * (ratio - reference)).mean()


def reference():
    model = Policy()
    model.reference_logps = build_reference_logprobs_cache(model, range(SAMPLES))
    return model


def sampler_indices(rank, size):
    indices = list(range(SAMPLES))
    indices += indices[: -SAMPLES % size]
    return indices[rank::size]


def parallel(mesh):
    model = Policy()
    indices = sampler_indices(dist.get_rank(), dist.get_world_size())
    model.reference_logps = build_reference_logprobs_cache(model, indices)
    dist.all_reduce(model.reference_logps)
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


batches = [{"index": torch.tensor(index)} for index in ([0, 3, 5, 1], [2, 6, 4, 0], [1, 2, 0, 3])]
arguments = reference, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
