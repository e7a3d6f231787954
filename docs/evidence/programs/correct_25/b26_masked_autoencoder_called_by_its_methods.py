"""A masked autoencoder under FSDP2 whose training loop calls forward_encoder and forward_decoder, never forward.

Thread: pytorch/pytorch pull request #125394 "[RFC][FSDP2] Added register_fsdp_forward_method for user fwd methods"
(2024), with the model of facebookresearch/mae, models_mae.py and engine_pretrain.py (accum_iter).
Correct: the registered methods run FSDP's hooks as forward would, so the root's parameters are gathered for both calls.
Width 20 over three ranks gives uneven shards with padding. The positions are frozen parameters and are sharded too. The
first of the two passes leaves its gradients unreduced, the last one reduces the sums of both; each divides its loss by
their number. Each image has as many hidden patches as any other, so means of means are the mean. The patches are
shuffled by an argsort of the batch's own noise and brought back by its inverse.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import titanlite

SIDE, PATCH, WIDTH, NARROW, HEADS, IMAGES, ACCUM_ITER = 12, 3, 20, 10, 2, 12, 2
PATCHES, KEPT, PIXELS = (SIDE // PATCH) ** 2, 5, 3 * PATCH**2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def sincos(width):
    """The fixed positions, with zeros for the class token."""
    angles = torch.arange(PATCHES)[:, None] / 50 ** (torch.arange(width // 2) / (width // 2))
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.cat([torch.zeros(1, width), table])[None]


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(sincos(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder_embed = nn.Linear(WIDTH, NARROW)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, NARROW))
        self.decoder_pos_embed = nn.Parameter(sincos(NARROW), requires_grad=False)
        self.decoder_blocks = nn.ModuleList([Block(NARROW)])
        self.decoder_norm = nn.LayerNorm(NARROW)
        self.decoder_pred = nn.Linear(NARROW, PIXELS)

    def random_masking(self, x, noise):
        shuffle = noise.argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        kept = shuffle[:, :KEPT, None].expand(-1, -1, x.shape[-1])
        mask = (restore >= KEPT).to(x.dtype)
        return x.gather(1, kept), mask, restore

    def forward_encoder(self, images, noise):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        x, mask, restore = self.random_masking(x, noise)
        cls_token = self.cls_token + self.pos_embed[:, :1]
        x = torch.cat([cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x), mask, restore

    def forward_decoder(self, x, restore):
        x = self.decoder_embed(x)
        hidden = self.mask_token.repeat(len(x), PATCHES - KEPT, 1)
        patches = torch.cat([x[:, 1:], hidden], dim=1)
        patches = patches.gather(1, restore[..., None].expand(-1, -1, NARROW))
        x = torch.cat([x[:, :1], patches], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def forward_loss(self, images, prediction, mask):
        """Of the hidden patches, whose pixels are normalized in each patch."""
        target = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        target = (target - mean) / (var + 1e-6).sqrt()
        error = (prediction - target).square().mean(-1)
        return (error * mask).sum() / mask.sum()

    def forward(self, images, noise):
        latent, mask, restore = self.forward_encoder(images, noise)
        prediction = self.forward_decoder(latent, restore)
        return self.forward_loss(images, prediction, mask)


def plain():
    return MaskedAutoencoder()


def parallel(mesh):
    model = MaskedAutoencoder()
    for block in [*model.blocks, *model.decoder_blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "forward_encoder")
    register_fsdp_forward_method(model, "forward_decoder")
    return model


def loss(model, batch):
    return model(batch["images"], batch["noise"])


def step(model, batch):
    total = 0.0
    pieces = zip(batch["images"].chunk(ACCUM_ITER), batch["noise"].chunk(ACCUM_ITER))
    for i, (images, noise) in enumerate(pieces):
        model.set_requires_gradient_sync(i == ACCUM_ITER - 1)
        latent, mask, restore = model.forward_encoder(images, noise)
        prediction = model.forward_decoder(latent, restore)
        value = model.forward_loss(images, prediction, mask) / ACCUM_ITER
        value.backward()
        total += value.item()
    return total


generator = torch.Generator().manual_seed(125394)


def photos():
    images = torch.randn(IMAGES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    noise = torch.rand(IMAGES, PATCHES, generator=generator, dtype=torch.float64)
    return {"images": images, "noise": noise}


arguments = plain, parallel
options = dict(
    batches=[photos() for _ in range(3)],
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
