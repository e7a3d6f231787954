"""Updates of a policy under FSDP2 from sampled answers: a clipped policy gradient and a divergence from a teacher, accumulated.

Thread: verl-project/verl issue #7200 "Supervised distillation loss normalization depends on micro-batch partitioning" (2026):
the information on the global batch is empty for this loss, so each micro-batch divides by its own tokens, not by the global
count.
Fault: Actor.losses calls agg_loss for the divergence without the counts of the global batch, so the term is the mean over one
micro-batch's answer tokens; the terms of the micro-batches are added up as they are, and FSDP averages the ranks.
REPAIR: `distill = agg_loss(divergence, mask)` -> `distill = agg_loss(divergence, mask, **info)`
A right first sentence says: the distillation term is divided by the answer tokens of its own micro-batch, not by the token
count of the global batch (times the data parallel size), so its weight depends on the cut into micro-batches and ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, HEADS, PROMPT, ANSWER, LAYERS = 22, 16, 2, 3, 8, 2
ROWS, MICRO_ROWS, CLIP, TEACHER_COEF = 8, 2, 0.2, 0.5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).log_softmax(-1)


def agg_loss(values, mask, batch_num_tokens=None, dp_size=1):
    """The mean over the answers' tokens; FSDP's average over dp_size ranks is made up for."""
    if batch_num_tokens is None:
        batch_num_tokens = mask.sum()
    return (values * mask).sum() / batch_num_tokens * dp_size


def clipped_objective(logp, old_logp, advantages):
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def token_losses(policy, batch):
    logprobs = policy(batch["tokens"][:, :-1])[:, PROMPT - 1 :]
    answers = batch["tokens"][:, PROMPT:]
    logp = logprobs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    surrogate = clipped_objective(logp, batch["old_logp"], batch["advantages"].unsqueeze(-1))
    teacher = batch["teacher_logits"].log_softmax(-1)
    divergence = (teacher.exp() * (teacher - logprobs)).sum(-1)
    return surrogate, divergence


class Actor:
    def __init__(self, policy, mesh):
        for layer in policy.layers:
            fully_shard(layer, mesh=mesh)
        self.policy = fully_shard(policy, mesh=mesh)
        self.mesh = mesh

    def losses(self, micro, info):
        surrogate, divergence = token_losses(self.policy, micro)
        mask = micro["mask"]
        policy_loss = agg_loss(surrogate, mask, **info)
        distill = agg_loss(divergence, mask)
        return policy_loss + TEACHER_COEF * distill

    def update_policy(self, batch):
        tokens = batch["mask"].sum()
        dist.all_reduce(tokens, group=self.mesh.get_group())
        info = dict(batch_num_tokens=tokens, dp_size=self.mesh.size())
        parts = {key: value.split(MICRO_ROWS) for key, value in batch.items()}
        micros = [dict(zip(parts, values)) for values in zip(*parts.values())]
        total = 0.0
        for i, micro in enumerate(micros):
            self.policy.set_requires_gradient_sync(i == len(micros) - 1)
            value = self.losses(micro, info)
            value.backward()
            total += value.detach()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total / self.mesh.size()


def plain():
    return Policy()


def parallel(mesh):
    actor = Actor(Policy(), mesh["dp"])
    return actor.policy, actor


def loss(model, batch):
    surrogate, divergence = token_losses(model, batch)
    return agg_loss(surrogate + TEACHER_COEF * divergence, batch["mask"])


def step(built, batch):
    return built[1].update_policy(batch)


generator = torch.Generator().manual_seed(7200)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rollouts():
    lengths = torch.randint(1, ANSWER + 1, (ROWS, 1), generator=generator)
    return {
        "tokens": torch.randint(0, VOCAB, (ROWS, PROMPT + ANSWER), generator=generator),
        "mask": (torch.arange(ANSWER) < lengths).double(),
        "old_logp": -3.1 + 0.3 * randn(ROWS, ANSWER),
        "advantages": randn(ROWS),
        "teacher_logits": 1.5 * randn(ROWS, ANSWER, VOCAB),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
