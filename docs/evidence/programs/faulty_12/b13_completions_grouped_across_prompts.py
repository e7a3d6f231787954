"""Group-relative policy optimization under FSDP2: each rank has some of the completions of every prompt.

Thread: StarsfieldAI/R1-V issue #67 "GRPO-Trainer bugs" (2025): rewards in another order than view(-1, num_generations) expects,
so that rewards of different prompts get a common mean and deviation.
Fault: in step, the ranks' rewards are put one below the other and cut into groups again by view: each group has the rewards of
two prompts of one rank, and not all of one prompt.
REPAIR: `torch.cat(gathered).view(-1, GENERATIONS)` -> `torch.cat(gathered, 1)`
A right first sentence says: the log probabilities of the first step agree, and loss and all gradients are wrong on both ranks:
the advantages in step come from rewards grouped across prompts, since the gathered rewards are concatenated over the prompts
instead of over the generations.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import gelu

import titanlite

VOCAB, WIDTH, PROMPT, LENGTH, PROMPTS, GENERATIONS, CLIP = 11, 8, 3, 8, 3, 4, 0.2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.past = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        seen = torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None]
        x = x + self.past(self.norm(x).cumsum(-2) / seen)
        return x + self.down(gelu(self.up(x)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens[..., :-1])
        for layer in self.layers:
            x = layer(x)
        chosen = self.head(x).log_softmax(-1).gather(-1, tokens[..., 1:, None])
        return chosen[..., PROMPT - 1 :, 0]


def normalize(groups):
    return (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)


def objective(logps, old, advantages):
    ratio = (logps - old).exp()
    advantages = advantages[..., None]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def loss(model, batch):
    return objective(model(batch["tokens"]), batch["old"], normalize(batch["rewards"]))


def parallel(mesh):
    model = Policy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model, batch):
    own = batch["rewards"].contiguous()
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    advantages = normalize(torch.cat(gathered).view(-1, GENERATIONS))
    advantages = advantages.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    value = objective(model(batch["tokens"]), batch["old"], advantages)
    value.backward()
    return value.detach()


rng = torch.Generator().manual_seed(504)
batches = []
for _ in range(3):
    prompts = torch.randint(VOCAB, (PROMPTS, 1, PROMPT), generator=rng).expand(-1, GENERATIONS, -1)
    completions = torch.randint(VOCAB, (PROMPTS, GENERATIONS, LENGTH - PROMPT), generator=rng)
    old = torch.randn(PROMPTS, GENERATIONS, LENGTH - PROMPT, generator=rng) / 4 - 2.5
    difficulty = 2 * torch.randn(PROMPTS, 1, generator=rng)
    rewards = difficulty + torch.randn(PROMPTS, GENERATIONS, generator=rng)
    batches.append(
        {"tokens": torch.cat([prompts, completions], -1), "old": old, "rewards": rewards}
    )
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split={"dp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
