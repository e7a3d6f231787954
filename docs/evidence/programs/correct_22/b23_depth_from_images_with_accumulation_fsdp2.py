"""Depth from single images with a frozen encoder under FSDP2; three micro-batches a step, holes in the depth maps.

Might be accused because: the division of FSDP2's gradient reduction is switched off; gradients aren't reduced in the
first two micro-batches; the decoder is entered by a method other than forward; the encoder's parameters are frozen
after the sharding; each rank sums its errors and never divides by the number of its own pixels, of which the ranks have
unequal numbers; and the losses of a step are added up over ranks and micro-batches.
Correct because: each loss is divided by the valid pixels of all ranks and micro-batches before its backward pass, so
sums are wanted; the unreduced gradients stay unsharded and are reduced with the last ones; refine is registered as a
forward method; frozen parameters are in units of their own and have no gradients, in the plain model neither.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import titanlite

WIDTH, SIZE, ROWS, MICROBATCHES = 8, 8, 12, 3


class EncoderBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm, self.conv2 = nn.GroupNorm(2, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x):
        x = self.conv1(x)
        return x + self.conv2(F.silu(self.norm(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([EncoderBlock(3, WIDTH, 1), EncoderBlock(WIDTH, WIDTH, 2)])

    def forward(self, x):
        features = []
        for block in self.blocks:
            x = block(x)
            features.append(x)
        return features


class Decoder(nn.Module):
    """A coarse map from the deep features, and a refinement of it from the fine ones."""

    def __init__(self):
        super().__init__()
        self.deep, self.fine = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        )
        self.coarse, self.residual = nn.Conv2d(WIDTH, 1, 1), nn.Conv2d(WIDTH + 1, 1, 3, padding=1)

    def forward(self, features):
        return self.coarse(F.silu(self.deep(features[1])))

    def refine(self, features, coarse):
        coarse = F.interpolate(coarse, scale_factor=2.0)
        x = torch.cat([F.silu(self.fine(features[0])), coarse], dim=1)
        return (coarse + self.residual(x)).squeeze(1)


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def freeze_encoder(self):
        self.encoder.requires_grad_(False)
        return self

    def forward(self, images):
        features = self.encoder(images)
        coarse = self.decoder(features)
        return self.decoder.refine(features, coarse) + self.log_scale


def summed_error(model, batch):
    """Of the logarithms of the depths; pixels without a measurement are zero."""
    valid = batch["depth"] > 0
    target = batch["depth"].clamp(min=1e-3).log()
    error = F.smooth_l1_loss(model(batch["image"]), target, beta=0.5, reduction="none")
    return (error * valid).sum()


def shard(model, mesh):
    for block in model.encoder.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.decoder, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model.decoder, "refine")
    fully_shard(model, mesh=mesh)
    for module in (model, model.decoder):
        module.set_gradient_divide_factor(1.0)
    return model.freeze_encoder()


def plain():
    return DepthNet().freeze_encoder()


def parallel(mesh):
    return shard(DepthNet(), mesh["dp"])


def loss(model, batch):
    return summed_error(model, batch) / (batch["depth"] > 0).sum()


def step(model, batch):
    pixels, total = (batch["depth"] > 0).sum(), torch.zeros(())
    dist.all_reduce(pixels)
    parts = zip(*(tensor.chunk(MICROBATCHES) for tensor in batch.values()))
    for i, part in enumerate(parts):
        model.set_requires_gradient_sync(i == MICROBATCHES - 1)
        value = summed_error(model, dict(zip(batch, part))) / pixels
        value.backward()
        total += value.detach()
    dist.all_reduce(total)
    return total


def clip(model):
    norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.3)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


generator = torch.Generator().manual_seed(2323)


def rooms():
    image = torch.rand(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    depth = 1 + 4 * image.mean(1) + torch.arange(SIZE) / SIZE
    holes = torch.rand(ROWS, SIZE, SIZE, generator=generator) < torch.rand(
        ROWS, 1, 1, generator=generator
    )
    return {"image": image, "depth": depth.masked_fill(holes, 0)}


batches = [rooms() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    microbatches=MICROBATCHES,
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(
        [p for p in parameters if p.requires_grad], lr=3e-3
    ),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
