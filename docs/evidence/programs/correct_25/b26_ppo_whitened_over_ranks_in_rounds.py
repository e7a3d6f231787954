"""PPO of an actor and a critic, each under FSDP2: advantages are whitened over the tokens of all ranks first.

Thread: THUDM/slime pull request #393 "Fix Pipeline Parallelism deadlock in distributed_masked_whiten" (2025): sum, sum
of squares and number of the masked advantages are all-reduced in the data-parallel group.
Correct: the values that the advantages come from are read without gradients, before any backward pass, with the weights
of this step, on the whole part of the rank; the update runs in microbatches. Their losses are sums over the tokens,
divided by the tokens of all ranks and multiplied by the ranks, which FSDP's mean undoes; its reduction waits for the
last microbatch. Actor and critic have a backward pass each. The losses of the actor have both signs and nearly cancel,
as the advantages have mean zero; the entropy keeps some of it. Clipped tokens have no gradient at all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, PROMPT, ANSWER, ROWS, MICROBATCHES = 24, 16, 3, 8, 8, 2
GAMMA, LAMBDA, CLIP, ENTROPY = 0.98, 0.9, 0.2, 0.01


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 30), nn.SiLU(), nn.Linear(30, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(y.flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, tokens):
        """What is said at the places before those of the answer."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, PROMPT - 1 : -1])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = Transformer(VOCAB), Transformer(1)


def masked_whiten(x, mask, group):
    sums = torch.stack([(x * mask).sum(), (x**2 * mask).sum(), mask.sum().to(x.dtype)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, squares, count = sums
    mean = total / count
    variance = (squares / count - mean**2) * count / (count - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask, count


@torch.no_grad()
def prepare(critic, batch, group=None):
    """Generalized advantages from the answer's end, returns, and the number of all tokens."""
    mask = batch["mask"]
    values = critic(batch["tokens"]).squeeze(-1) * mask
    following, running, advantages = torch.zeros(len(mask)), torch.zeros(len(mask)), []
    for t in reversed(range(ANSWER)):
        delta = batch["rewards"][:, t] + GAMMA * following - values[:, t]
        running = delta + GAMMA * LAMBDA * running
        advantages.append(running)
        following = values[:, t]
    advantages = torch.stack(advantages[::-1], dim=1)
    whitened, count = masked_whiten(advantages, mask, group)
    return {**batch, "advantages": whitened, "returns": advantages + values}, count


def actor_loss(actor, batch):
    logps = actor(batch["tokens"]).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    logps = logps.gather(-1, batch["tokens"][:, PROMPT:, None]).squeeze(-1)
    ratio = torch.exp((logps - batch["old_logps"]).clamp(-20, 20))
    gains = ratio * batch["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantages"]
    return ((-torch.minimum(*gains) - ENTROPY * entropy) * batch["mask"]).sum()


def critic_loss(critic, batch):
    errors = critic(batch["tokens"]).squeeze(-1) - batch["returns"]
    return 0.5 * (errors**2 * batch["mask"]).sum()


def plain():
    return ActorCritic()


def parallel(mesh):
    model = ActorCritic()
    for network in (model.actor, model.critic):
        for layer in network.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(network, mesh=mesh["dp"])
    return model, mesh.get_group("dp")


def loss(model, batch):
    batch, count = prepare(model.critic, batch)
    return (actor_loss(model.actor, batch) + critic_loss(model.critic, batch)) / count


def step(built, part):
    model, group = built
    ranks, reported = dist.get_world_size(group), torch.zeros(())
    part, count = prepare(model.critic, part, group)
    pieces = zip(*(value.chunk(MICROBATCHES) for value in part.values()))
    for i, piece in enumerate(pieces):
        piece = dict(zip(part, piece))
        for network, loss_sum in ((model.actor, actor_loss), (model.critic, critic_loss)):
            network.set_requires_gradient_sync(i == MICROBATCHES - 1)
            value = loss_sum(network, piece) / count
            (value * ranks).backward()
            reported += value.detach()
    dist.all_reduce(reported, group=group)
    return reported


generator = torch.Generator().manual_seed(393)


def rollouts():
    tokens = torch.randint(0, VOCAB, (ROWS, PROMPT + ANSWER), generator=generator)
    lengths = torch.randint(2, ANSWER + 1, (ROWS, 1), generator=generator)
    place = torch.arange(ANSWER)
    noise = torch.randn(2, ROWS, ANSWER, generator=generator, dtype=torch.float64)
    return {
        "tokens": tokens,
        "mask": place < lengths,
        "old_logps": 0.4 * noise[0] - 3.3,
        "rewards": 0.1 * noise[1] * (place < lengths) + (place == lengths - 1),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
