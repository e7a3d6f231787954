"""A PPO actor update under FSDP2: clipped policy loss averaged over response tokens, accumulated over micro-batches.

Thread: volcengine/verl pull request #906 "fix: gradient accumulation in DP" (2025): a micro-batch's loss was scaled by its share
of the sequences, which fits a mean over sequences alone, while the default loss is a mean over tokens.
Fault: update_policy takes each micro-batch's mean over its own response tokens and weights it by its share of the rank's rows,
and FSDP averages the ranks equally; with responses of different lengths tokens in short micro-batches count for more.
REPAIR: `weight = len(micro["tokens"]) / rows` -> `weight = micro["mask"].sum() * dist.get_world_size() / response_tokens`
A right first sentence says: update_policy weights the token-mean loss of each micro-batch by its number of rows instead of its
share of the global batch's response tokens, so loss and all gradients differ from the token mean over the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, PROMPT, LENGTH, CLIP, MICRO_ROWS = 16, 16, 3, 10, 0.2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def policy_losses(model, batch):
    """The clipped objective of every response token."""
    logits = model(batch["tokens"])[:, PROMPT - 1 : -1]
    responses = batch["tokens"][:, PROMPT:]
    log_prob = logits.log_softmax(dim=-1).gather(-1, responses[..., None]).squeeze(-1)
    ratio = (log_prob - batch["old_log_prob"]).exp()
    advantages = batch["advantages"][:, None]
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def plain():
    return Actor()


def parallel(mesh):
    model = Actor()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss(model, batch):
    return masked_mean(policy_losses(model, batch), batch["mask"])


def update_policy(model, batch):
    response_tokens = batch["mask"].sum()
    dist.all_reduce(response_tokens)
    if response_tokens == 0:
        return None
    rows = len(batch["tokens"])
    total = 0.0
    for start in range(0, rows, MICRO_ROWS):
        micro = {key: value[start : start + MICRO_ROWS] for key, value in batch.items()}
        weight = len(micro["tokens"]) / rows
        value = masked_mean(policy_losses(model, micro), micro["mask"]) * weight
        value.backward()
        total += value.detach()
    return total


def make_batch(generator):
    lengths = torch.randint(1, LENGTH - PROMPT + 1, (8,), generator=generator)
    shape = (8, LENGTH - PROMPT)
    return {
        "tokens": torch.randint(0, VOCAB, (8, LENGTH), generator=generator),
        "old_log_prob": -2.8 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(8, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(shape[1]) < lengths[:, None]).to(torch.float64),
    }


generator = torch.Generator().manual_seed(906)
batches = [make_batch(generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=update_policy, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
