"""REINFORCE++ updates of a policy on data and context parallel ranks under FSDP2; the advantages of the tokens are whitened.

Thread: THUDM/slime pull request #2235 "whiten advantages over the DP group that includes context parallel" (2026): the statistics
are reduced over the data parallel group without context parallelism, so each slice of the sequences is whitened by its own.
Fault: Advantages.whiten sums count, sum and squares over the "dp" group only, although a rank holds just its "cp" part of each
sequence; the two halves of a sequence get different means and deviations, and neither is that of the batch.
REPAIR: `group = self.mesh.get_group("dp")` -> `group = self.everyone`
A right first sentence says: the advantages' mean and variance are reduced over the dp group only and not over cp too, so every
context parallel slice is whitened by the statistics of its own tokens and the policy gradient is not that of the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, ROWS, CLIP = 22, 16, 4, 12, 6, 0.2


class GatherSequence(torch.autograd.Function):
    """Keys or values of all slices; the gradient is summed and comes back to the slice."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.contiguous().clone(), group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


class Slice:
    """The part of the sequence at hand."""

    def __init__(self, group=None):
        self.group, self.index = group, 0 if group is None else dist.get_rank(group)

    def positions(self, length):
        return torch.arange(length) + self.index * length

    def gather(self, x):
        return x if self.group is None else GatherSequence.apply(x, self.group)


class DecoderLayer(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.q, self.kv, self.o = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.input_norm(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k, v = self.part.gather(k), self.part.gather(v)
        allowed = self.part.positions(x.size(1))[:, None] >= torch.arange(k.size(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.post_norm(x))))


class Policy(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(part) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, actions):
        x = self.words(tokens) + self.places(self.part.positions(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return -F.cross_entropy(self.head(self.norm(x)).mT, actions, reduction="none")


class Advantages:
    def __init__(self, mesh=None, everyone=None):
        self.mesh, self.everyone = mesh, everyone

    def whiten(self, values, mask):
        stats = torch.stack([mask.sum(), (values * mask).sum(), (values.square() * mask).sum()])
        if self.mesh is not None:
            group = self.mesh.get_group("dp")
            dist.all_reduce(stats, group=group)
        count, total, squares = stats
        mean = total / count
        variance = (squares / count - mean.square()) * count / (count - 1)
        return (values - mean) * (variance + 1e-8).rsqrt() * mask


def policy_loss(model, batch, advantages):
    """Summed over the tokens of the completions."""
    logps = model(batch["tokens"], batch["actions"])
    ratio = (logps - batch["old_logps"]).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(surrogate * batch["mask"]).sum()


def plain():
    return Policy(Slice())


def parallel(mesh):
    model, flat = Policy(Slice(mesh.get_group("cp"))), mesh["dp", "cp"]._flatten("dp_cp")
    for layer in model.layers:
        fully_shard(layer, mesh=flat)
    return fully_shard(model, mesh=flat), Advantages(mesh, flat.get_group())


def loss(model, batch):
    advantages = Advantages().whiten(batch["returns"], batch["mask"])
    return policy_loss(model, batch, advantages) / batch["mask"].sum()


def step(built, batch):
    """FSDP averages the gradients, hence the factor."""
    model, advantages = built
    whitened = advantages.whiten(batch["returns"], batch["mask"])
    tokens = batch["mask"].sum()
    dist.all_reduce(tokens)
    value = policy_loss(model, batch, whitened) / tokens
    (value * dist.get_world_size()).backward()
    dist.all_reduce(total := value.detach().clone())
    return total


generator = torch.Generator().manual_seed(2235)


def rollouts():
    """The rewards arrive at the ends, so that the returns shrink towards the prompts."""
    text = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    ends = torch.randint(6, LENGTH + 1, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH)
    mask = (places >= 2) & (places < ends)
    rewards = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return {
        "tokens": text[:, :-1].contiguous(),
        "actions": text[:, 1:].contiguous(),
        "mask": mask,
        "returns": (1.5 * rewards * 0.8 ** (ends - places) + 0.1 * noise) * mask,
        "old_logps": -3.1 + 0.2 * noise.flip(0),
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "cp": 1},
    ranks={"dp": 2, "cp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
