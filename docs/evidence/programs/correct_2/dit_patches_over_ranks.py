"""A diffusion transformer whose image rows are spread over the ranks.

Thread: https://github.com/mit-han-lab/distrifuser/issues/14 "DistriConv2dPP and other models", comment
of 2024-06-27 ("you need to slice the positional embedding").
Right: the patch embedding's stride is its kernel, so it needs no neighbours; each rank adds its slice of the
positional embedding; LayerNorm works on channels; attention gathers keys and values of all patches.
Must not be accused: norms without communication, a slice of pos_embed, whose gradient is zero
outside it on each rank until DDP averages, and the factor of ranks that this average takes back.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import titanlite

DIM, HEADS, PATCH, SIDE = 16, 2, 2, 8
TOKENS = (SIDE // PATCH) ** 2


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class DistriSelfAttentionPP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.to_out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, kv = self.to_q(x), self.to_kv(x)
        if self.group is not None:
            kv = GatherTokens.apply(kv, self.group)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        return self.to_out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class JointTransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.modulation = nn.Linear(DIM, 4 * DIM)
        self.attn = DistriSelfAttentionPP()
        self.ff = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def forward(self, x, temb):
        shift, scale, gate, gate_ff = self.modulation(temb)[:, None].chunk(4, -1)
        x = x + gate * self.attn(self.norm1(x) * (1 + scale) + shift)
        return x + gate_ff * self.ff(self.norm2(x))


class DiT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(torch.randn(1, TOKENS, DIM) * 0.1)
        self.time_embed = nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(JointTransformerBlock() for _ in range(2))
        self.proj_out = nn.Linear(DIM, 3 * PATCH * PATCH)

    def forward(self, latents, timestep):
        x = self.proj(latents)
        rows = x.shape[2]
        x = x.flatten(2).transpose(1, 2)
        first = 0 if self.group is None else dist.get_rank(self.group) * x.shape[1]
        x = x + self.pos_embed[:, first : first + x.shape[1]]
        temb = self.time_embed(timestep[:, None]).tanh()
        for block in self.blocks:
            x = block(x, temb)
        x = self.proj_out(x).unflatten(1, (rows, -1)).unflatten(-1, (3, PATCH, PATCH))
        return x.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def loss(model, batch):
    return mse_loss(model(batch["latents"], batch["timestep"]), batch["noise"])


def rows_of_rank(batch, mesh):
    parts = {
        name: batch[name].chunk(mesh.size(), 2)[mesh.get_local_rank()]
        for name in ("latents", "noise")
    }
    return {**parts, "timestep": batch["timestep"]}


def parallel(mesh):
    model = DiT()
    model.group = mesh.get_group()
    for block in model.blocks:
        block.attn.group = mesh.get_group()
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(53)
batches = [
    {
        **{
            name: torch.randn(2, 3, SIDE, SIDE, generator=generator)
            for name in ("latents", "noise")
        },
        "timestep": torch.rand(2, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"patch": 2}, split=rows_of_rank)
    print(titanlite.compare(DiT, parallel, **options))
