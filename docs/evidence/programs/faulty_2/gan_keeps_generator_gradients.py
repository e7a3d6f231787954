"""A GAN whose discriminator keeps the gradients of the generator's pass.

Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/591 "GAN training with Pytorch Lightning
is broken.", 2019-12-05.
Wrong: the generator's loss is backpropagated through the discriminator, whose gradients are not
cleared before its own loss.
A right diagnosis says: outputs, loss and the generator's gradients agree; all gradients of the
discriminator are wrong: they also contain those of the generator's loss.
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Gan(nn.Module):
    def __init__(self, latent=6, data=10):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, data))
        self.discriminator = nn.Sequential(nn.Linear(data, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def adversarial(logits, real):
    return bce(logits, torch.full_like(logits, float(real)))


def simultaneous_loss(gan, batch):
    """Each network's loss has gradients for this network alone."""
    fake = gan.generator(batch["z"])
    frozen = {name: p.detach() for name, p in gan.discriminator.named_parameters()}
    g_loss = adversarial(functional_call(gan.discriminator, frozen, (fake,)), True)
    real, generated = gan.discriminator(batch["x"]), gan.discriminator(fake.detach())
    d_loss = (adversarial(real, True) + adversarial(generated, False)) / 2
    return g_loss + d_loss


class GanTask:
    def __init__(self, gan):
        self.gan = gan

    def training_step(self, batch, optimizer_idx):
        gan = self.gan
        if optimizer_idx == 0:
            self.fake = gan.generator(batch["z"])
            return adversarial(gan.discriminator(self.fake), True)
        real, fake = gan.discriminator(batch["x"]), gan.discriminator(self.fake.detach())
        return (adversarial(real, True) + adversarial(fake, False)) / 2


def configure():
    gan = Gan()
    gan.generator = DistributedDataParallel(gan.generator)
    gan.discriminator = DistributedDataParallel(gan.discriminator)
    return gan, GanTask(gan)


def fit_batch(built, batch):
    total = 0.0
    for optimizer_idx in (0, 1):
        loss = built[1].training_step(batch, optimizer_idx)
        loss.backward()
        total = total + loss.detach()
    return total


generator = torch.Generator().manual_seed(591)
batches = [
    {"x": torch.randn(8, 10, generator=generator) + 1, "z": torch.randn(8, 6, generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=simultaneous_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Gan, configure, step=fit_batch, microbatches=1, **options))
