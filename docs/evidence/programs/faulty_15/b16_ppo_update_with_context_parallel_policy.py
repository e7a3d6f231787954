"""A PPO update of a small language model policy whose responses are cut over context parallel ranks, two data parallel replicas.

Thread: THUDM/slime pull request #2235 "fix: whiten advantages over the DP group that includes context parallel" (2026): with
--normalize-advantages, sums and counts were all-reduced over the data parallel group alone, though each rank holds only a part
of each sequence.
Fault: PpoActor whitens its advantages with a mean and variance over the "dp" axis; ranks of one dp group hold the same part of
the sequences, so first halves and second halves get different means and scales, and neither is that of the whole batch.
REPAIR: `self.stats_group = mesh.get_group("dp")` -> `self.stats_group = None`
A right first sentence says: the advantages are whitened with statistics over the dp ranks only, per context parallel rank, so
each part of the sequences is normalized by its own mean and variance instead of those of the whole batch over dp and cp.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, CLIP = 17, 12, 2, 8, 0.2


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; a rank gets back the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, ctx.dim)[rank], None, None


class Attention(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def gather(self, x, dim):
        if self.cp_group is None:
            return x
        return GatherSequence.apply(x.contiguous(), dim, self.cp_group)

    def forward(self, x, positions):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k, v = self.gather(k, 2), self.gather(v, 2)
        visible = positions[:, None, :, None] >= self.gather(positions, 1)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x, positions):
        x = x + self.attention(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x)).log_softmax(-1)


def whiten(advantages, count, total, squares):
    mean = total / count
    variance = squares / count - mean.square()
    return (advantages - mean) * (variance + 1e-8).rsqrt()


def moments(values, mask):
    kept = values[mask]
    return torch.stack([mask.sum().to(values), kept.sum(), kept.square().sum()])


def policy_loss(model, batch, advantages):
    """The clipped objective, summed over the tokens of the responses."""
    logps = model(batch["tokens"], batch["positions"])
    logps = logps.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (logps - batch["old_logps"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    return per_token[batch["mask"]].sum()


class PpoActor:
    def __init__(self, model, mesh):
        self.model = model
        self.stats_group = mesh.get_group("dp")
        for block in model.blocks:
            block.attention.cp_group = mesh.get_group("cp")

    def update(self, batch):
        stats = moments(batch["advantages"], batch["mask"])
        dist.all_reduce(stats, group=self.stats_group)
        advantages = whiten(batch["advantages"], *stats)

        tokens = batch["mask"].sum()
        dist.all_reduce(tokens)
        value = policy_loss(self.model, batch, advantages) / tokens
        value.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        return value.detach()


def plain():
    return Policy()


def parallel(mesh):
    model = Policy()
    return model, PpoActor(model, mesh)


def loss(model, batch):
    stats = moments(batch["advantages"], batch["mask"])
    return policy_loss(model, batch, whiten(batch["advantages"], *stats)) / batch["mask"].sum()


def step(built, batch):
    return built[1].update(batch)


generator = torch.Generator().manual_seed(2235)


def rollouts(number=4):
    shape = number, LENGTH
    lengths = torch.randint(5, LENGTH + 1, (number, 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(number, 1)
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "tokens": torch.randint(0, VOCAB, shape, generator=generator),
        "actions": torch.randint(0, VOCAB, shape, generator=generator),
        "positions": positions,
        "mask": (positions >= 2) & (positions < lengths),
        "advantages": rewards.flip(1).cumsum(1).flip(1),
        "old_logps": uniform * 0.5 - 3.1,
    }


batches = [rollouts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "cp": 1},
    ranks={"dp": 2, "cp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
