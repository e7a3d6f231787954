"""A GSPO update of a small policy: responses cut over context parallel ranks, groups of responses over data parallel replicas.

Thread: THUDM/slime pull request #1102 "Optimize CP loss communication" (2025), on GSPO under context parallelism: a rank has
only a segment of the log-probabilities, and the ranks' partial values must be aggregated to the sequence's (before, the whole
log-probabilities were gathered).
Fault: GspoTrainer.sequence_mean averages the log-ratio over the tokens of a response which this rank holds, so that each context
parallel rank has an importance ratio (and a clipping decision) of its own piece of the response.
REPAIR: `return (values * mask).sum(1) / mask.sum(1).clamp(min=1)` -> `return self.cp_sum((values * mask).sum(1)) / self.cp_sum(mask.sum(1)).clamp(min=1)`
A right first sentence says: the sequence-level importance ratio is computed from the rank's own piece of each response instead of
the whole response over the cp ranks, so ratio, clipping and gradients are those of pieces.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, GROUP, PROMPT = 17, 12, 3, 10, 4, 2
CLIP_LOW, CLIP_HIGH, KL = 0.1, 0.12, 0.05


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllGatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, group):
        ctx.group = group
        parts = [torch.empty_like(kv) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, kv, group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=-2)[dist.get_rank(ctx.group)], None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv, self.o = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x, positions, cp_group):
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        kv = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if cp_group is not None:
            kv = AllGatherKV.apply(kv.contiguous(), cp_group)
        visible = positions[:, None] >= torch.arange(LENGTH)
        y = F.scaled_dot_product_attention(q, *kv, attn_mask=visible)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Policy(nn.Module):
    cp_group = None

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def logps(self, batch):
        positions = batch["positions"][0]
        x = self.tokens(batch["tokens"]) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, positions, self.cp_group)
        return -F.cross_entropy(self.lm_head(self.norm(x)).mT, batch["actions"], reduction="none")


def group_advantages(rewards):
    groups = rewards.view(-1, GROUP)
    return (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    ).flatten()


class Objective:
    def sequence_mean(self, values, mask):
        return (values * mask).sum(1).div(mask.sum(1))

    def token_mean(self, values, mask):
        return (values * mask).sum() / mask.sum()

    def __call__(self, model, batch):
        logps, mask = model.logps(batch), batch["mask"]
        ratio = self.sequence_mean(logps - batch["old_logps"], mask).exp()
        advantages = group_advantages(batch["rewards"])
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages).mean()
        delta = batch["ref_logps"] - logps
        return KL * self.token_mean(delta.exp() - delta - 1, mask) - surrogate


class GspoTrainer(Objective):
    def __init__(self, model, mesh):
        self.model, self.cp_group, self.dp_group = model, mesh.get_group("cp"), mesh.get_group("dp")
        model.cp_group = self.cp_group

    def cp_sum(self, x):
        return SumOverRanks.apply(x, self.cp_group)

    def sequence_mean(self, values, mask):
        return (values * mask).sum(1) / mask.sum(1).clamp(min=1)

    def token_mean(self, values, mask):
        tokens = mask.sum() / dist.get_world_size(self.dp_group)
        dist.all_reduce(tokens)
        return self.cp_sum((values * mask).sum()) / tokens

    def update(self, batch):
        value = self(self.model, batch)
        value.backward()
        logged = value.detach() / dist.get_world_size(self.cp_group)
        for total in [logged] + [p.grad for p in self.model.parameters()]:
            dist.all_reduce(total)
            total /= dist.get_world_size(self.dp_group)
        return logged


loss, plain = Objective(), Policy


def parallel(mesh):
    model = Policy()
    return model, GspoTrainer(model, mesh)


def step(built, batch):
    return built[1].update(batch)


def split(batch, mesh):
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    rows = {name: tensor.chunk(2)[dp] for name, tensor in batch.items()}
    return {name: t.chunk(2, 1)[cp] if t.ndim == 2 else t for name, t in rows.items()}


generator = torch.Generator().manual_seed(1102)


def rollout(number=2 * GROUP):
    shape = number, LENGTH
    lengths = torch.randint(6, LENGTH + 1, (number, 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(number, 1)
    mask = ((positions >= PROMPT) & (positions < lengths)).double()
    text = torch.randint(0, VOCAB, (number, LENGTH + 1), generator=generator)
    tokens, actions = text[:, :-1], text[:, 1:]
    old, ref = torch.rand(2, *shape, generator=generator, dtype=torch.float64) * 0.8 - 3.3
    rewards = torch.randn(number, generator=generator, dtype=torch.float64)
    batch = dict(tokens=tokens, actions=actions, positions=positions, mask=mask, rewards=rewards)
    return batch | {"old_logps": old, "ref_logps": ref}


batches = [rollout() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2, "cp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
