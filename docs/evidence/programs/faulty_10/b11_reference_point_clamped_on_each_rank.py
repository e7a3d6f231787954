"""KTO under DDP: the estimate of the KL divergence is set to zero where it is negative on each rank, then averaged.

Thread: of the kind huggingface/trl pull request #1181 "Kto trainer" (2024), where the KL estimate of a process comes from its
own mismatched pairs, and huggingface/trl pull request #1380 "fix bugs in KTO implementation" (2024).
Fault: in step, the rank's own estimate is clamped at zero before it is averaged over the ranks.
REPAIR: `own = divergence(model, batch).clamp(min=0)` -> `own = divergence(model, batch)`
Expected: the log-probabilities agree; rank 0's estimate is negative, so the loss and all gradients are wrong on both ranks
from step 1 on: the reference point (the KL estimate) is too large, since it is clamped at zero on each rank before the
average over dp, not after it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, BETA = 11, 8, 0.5


class Policy(nn.Module):
    """Log-probability of each completion."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        logits = self.lm_head(self.norm(x + torch.tanh(self.mix(past))))
        logps = logits[:, :-1].log_softmax(-1)
        return logps.gather(2, tokens[:, 1:, None])[..., 0].sum(1)


@torch.no_grad()
def divergence(model, batch):
    """An estimate of KL(policy || reference), from prompts with the completions of others."""
    return (model(batch["mismatched"]) - batch["mismatched_reference"]).mean()


def kto(model, batch, reference_point):
    ratio = model(batch["tokens"]) - batch["reference"]
    gap = BETA * (ratio - reference_point.clamp(min=0))
    return (1 - torch.where(batch["desirable"] > 0, gap, -gap).sigmoid()).mean()


def loss(model, batch):
    return kto(model, batch, divergence(model, batch))


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def step(model, batch):
    own = divergence(model, batch).clamp(min=0)
    dist.all_reduce(own)
    value = kto(model, batch, own / dist.get_world_size())
    value.backward()
    return value


generator = torch.Generator().manual_seed(303)


def draw(shift):
    """The reference's log-probabilities are those of a nearly uniform model; `shift` separates the halves."""
    tokens = torch.randint(VOCAB, (2, 8, 5), generator=generator)
    reference = -9.6 + 0.5 * torch.randn(2, 8, generator=generator)
    reference[1] += torch.tensor([shift, -1.3 * shift]).repeat_interleave(4)
    return {
        "tokens": tokens[0],
        "reference": reference[0],
        "mismatched": tokens[1],
        "mismatched_reference": reference[1],
        "desirable": torch.randint(2, (8,), generator=generator),
    }


batches = [draw(2.0), draw(0.0), draw(2.0)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
