"""Segmentation of retinal vessels by a small U-Net under DDP, with a cross entropy and a soft Dice loss per image.

Thread: pytorch/pytorch issue #47260 "DDP doesn't work with retain_graph = True" (2020): after the first backward pass
the reducer doesn't expect any more, and the gradients of the following passes aren't synchronized.
Fault: VesselTrainer.training_step runs one backward pass per loss with retain_graph=True after a single forward pass;
DDP averages the gradients of the first only, those of the Dice loss stay on their rank and the replicas drift apart.
REPAIR: `for value in losses.values():` -> `for value in [sum(losses.values())]:`
A right first sentence says: one forward pass of DDP is followed by two backward passes, of which only the first is
reduced; the gradient of the Dice loss is each rank's own, so the ranks' gradients and weights differ.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, SIZE, ROWS = 6, 16, 4
DICE_WEIGHT = 0.5


class Conv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
        )


class VesselNet(nn.Module):
    def __init__(self):
        super().__init__()
        c = CHANNELS
        self.encoder1, self.encoder2, self.bottom = Conv(3, c), Conv(c, 2 * c), Conv(2 * c, 2 * c)
        self.decoder2, self.decoder1 = Conv(4 * c, c), Conv(2 * c, c)
        self.output = nn.Conv2d(c, 1, 1)

    def forward(self, image):
        e1 = self.encoder1(image)
        e2 = self.encoder2(F.avg_pool2d(e1, 2))
        quarter = self.bottom(F.avg_pool2d(e2, 2))
        half = self.decoder2(torch.cat([F.interpolate(quarter, scale_factor=2), e2], 1))
        full = self.decoder1(torch.cat([F.interpolate(half, scale_factor=2), e1], 1))
        return self.output(full)


def vessel_losses(logits, vessels):
    """Cross entropy of the pixels and the soft Dice loss of each image, both averaged over the images."""
    probabilities = logits.sigmoid()
    overlap = (probabilities * vessels).sum((1, 2, 3))
    areas = probabilities.sum((1, 2, 3)) + vessels.sum((1, 2, 3))
    return {
        "bce": F.binary_cross_entropy_with_logits(logits, vessels),
        "dice": DICE_WEIGHT * (1 - (2 * overlap + 1) / (areas + 1)).mean(),
    }


class VesselTrainer:
    def __init__(self, net, mesh):
        self.group = mesh.get_group()
        self.net = DistributedDataParallel(net, process_group=self.group)
        self.history = []

    def training_step(self, batch):
        losses = vessel_losses(self.net(batch["image"]), batch["vessels"])
        for value in losses.values():
            value.backward(retain_graph=True)
        values = torch.stack([value.detach() for value in losses.values()])
        dist.all_reduce(values, group=self.group)
        values /= dist.get_world_size(self.group)
        self.history.append(dict(zip(losses, values.tolist())))
        return values.sum()


def plain():
    return VesselNet()


def parallel(mesh):
    trainer = VesselTrainer(VesselNet(), mesh["dp"])
    return trainer.net, trainer


def loss(model, batch):
    return sum(vessel_losses(model(batch["image"]), batch["vessels"]).values())


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(47260)


def fundus_images():
    image = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
    vessels = image.mean(1, keepdim=True) + 0.3 * noise > 0.4
    return {"image": image, "vessels": vessels.to(image.dtype)}


batches = [fundus_images() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
