"""Group-relative policy updates in which each rank holds some answers to every prompt; the groups' statistics are summed up.

Might be accused because: the rows are dealt out in turn and not in blocks, no rank holds a whole group, each rank's advantages
don't add up to zero, and the gradients are summed over the ranks without any average.
Correct because: the mean and the deviation of a group come from sums over all ranks, which are the whole group's; each rank's
loss is divided by the number of answer tokens of all ranks, so the sum of the gradients is that of the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, PROMPT, ANSWER, PROMPTS, GROUP, CLIP, BETA = 18, 16, 3, 6, 3, 4, 0.2, 0.05


class Policy(nn.Module):
    """A causal convolution, then two residual layers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens[:, :-1])
        x = x + self.mix(F.pad(x.mT, (3, 0))).mT
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        logprobs = self.head(x)[:, PROMPT - 1 :].log_softmax(-1)
        return logprobs.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def same(values):
    return values


def over_ranks(values):
    values = values.clone()
    dist.all_reduce(values)
    return values


def advantages(rewards, prompts, total):
    """Each answer's reward less its group's mean, over its group's standard deviation."""
    members = F.one_hot(prompts, PROMPTS).to(rewards)
    count = total(members.sum(0))
    mean = total(members.mT @ rewards) / count
    centred = rewards - mean[prompts]
    variance = total(members.mT @ centred**2) / (count - 1)
    return centred / (variance.sqrt() + 1e-4)[prompts]


def objective(model, batch, total=same):
    scale = advantages(batch["rewards"], batch["prompts"], total)[:, None]
    logps, mask = model(batch["tokens"]), batch["mask"]
    ratio = (logps - batch["old_logps"]).exp()
    policy = -torch.minimum(ratio * scale, ratio.clamp(1 - CLIP, 1 + CLIP) * scale)
    gap = batch["reference_logps"] - logps
    losses = policy + BETA * (gap.exp() - gap - 1)
    return (losses * mask).sum() / total(mask.sum())


def plain():
    return Policy()


def parallel(mesh):
    return Policy()


def loss(model, batch):
    return objective(model, batch)


def step(model, batch):
    value = objective(model, batch, over_ranks)
    value.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradients)
    for p, part in zip(
        model.parameters(), gradients.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad.copy_(part.view_as(p))
    return over_ranks(value.detach())


def in_turn(batch, mesh):
    rank, world = mesh.get_local_rank("dp"), mesh["dp"].size()
    return {key: value[rank::world] for key, value in batch.items()}


generator = torch.Generator().manual_seed(2111)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rollouts():
    rows = PROMPTS * GROUP
    lengths = torch.randint(1, ANSWER + 1, (rows, 1), generator=generator)
    return {
        "tokens": torch.randint(0, VOCAB, (rows, PROMPT + ANSWER), generator=generator),
        "prompts": torch.arange(PROMPTS).repeat_interleave(GROUP),
        "mask": (torch.arange(ANSWER) < lengths).double(),
        "rewards": randn(rows),
        "old_logps": -2.9 + 0.3 * randn(rows, ANSWER),
        "reference_logps": -2.9 + 0.3 * randn(rows, ANSWER),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=in_turn,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
