"""Policy updates by Dr. GRPO under DDP: answers of very different lengths, in micro-batches cut to their longest answer.

Thread: verl-project/verl issue #3741 "DrGRPO Implement is right???" (2025): the mode that sums over tokens divides by the width
of the loss mask, which should be one constant throughout training, and not what the batch at hand is padded to.
Fault: aggregate divides by mask.size(-1); the trainer trims each micro-batch to its own longest answer, so the divisor differs
between micro-batches and ranks, and short ones weigh too much.
REPAIR: `per_row = (values * mask).sum(-1) / mask.size(-1)` -> `per_row = (values * mask).sum(-1) / MAX_ANSWER`
A right first sentence says: the token sums are divided by the padded length of the own trimmed micro-batch, not by the constant
maximum answer length, so the loss and the gradients depend on how the rows are spread over micro-batches and ranks.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, HEADS, PROMPT, MAX_ANSWER, LAYERS = 21, 16, 4, 3, 9, 2
PROMPTS, GROUP, MICRO_ROWS, CLIP_LOW, CLIP_HIGH = 4, 4, 2, 0.2, 0.28


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(PROMPT + MAX_ANSWER, WIDTH)
        self.h = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        """The log-probabilities of the answers' tokens."""
        x = self.wte(tokens[:, :-1]) + self.wpe(torch.arange(tokens.size(1) - 1))
        for layer in self.h:
            x = layer(x)
        logprobs = self.head(self.ln_f(x))[:, PROMPT - 1 :].log_softmax(-1)
        return logprobs.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def aggregate(values, mask, rows):
    per_row = (values * mask).sum(-1) / mask.size(-1)
    return per_row.sum() / rows


def surrogate(policy, batch):
    ratio = (policy(batch["tokens"]) - batch["old_logps"]).exp()
    advantages = batch["advantages"][:, None]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def trim(micro):
    """Cuts the padding behind the longest answer."""
    longest = int(micro["mask"].sum(-1).max())
    return {
        "tokens": micro["tokens"][:, : PROMPT + longest],
        "mask": micro["mask"][:, :longest],
        "old_logps": micro["old_logps"][:, :longest],
        "advantages": micro["advantages"],
    }


def micro_batches(batch):
    order = batch["mask"].sum(-1).argsort()
    for rows in order.split(MICRO_ROWS):
        yield trim({key: value[rows] for key, value in batch.items()})


def plain():
    return Policy()


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def loss(model, batch):
    return aggregate(surrogate(model, batch), batch["mask"], len(batch["mask"]))


def step(model, batch):
    micros = list(micro_batches(batch))
    total = torch.zeros(())
    for i, micro in enumerate(micros):
        with nullcontext() if i == len(micros) - 1 else model.no_sync():
            value = aggregate(surrogate(model, micro), micro["mask"], len(batch["mask"]))
            value.backward()
        total += value.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


generator = torch.Generator().manual_seed(3741)


def rollouts():
    rows = PROMPTS * GROUP
    lengths = torch.randint(1, MAX_ANSWER + 1, (rows, 1), generator=generator)
    lengths[0] = MAX_ANSWER
    rewards = torch.randn(PROMPTS, GROUP, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, MAX_ANSWER, generator=generator, dtype=torch.float64)
    return {
        "tokens": torch.randint(0, VOCAB, (rows, PROMPT + MAX_ANSWER), generator=generator),
        "mask": (torch.arange(MAX_ANSWER) < lengths).double(),
        "old_logps": -3.0 + 0.3 * noise,
        "advantages": (rewards - rewards.mean(1, keepdim=True)).flatten(),
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
