# dit/loss.py
import torch

from .noise import noise_of


def flow_matching(velocity, batch):
    """The sum over samples of the mean squared error of the velocity."""
    return squared_error(velocity, noise_of(batch["image"], batch["sample_keys"]), batch)


def squared_error(velocity, noise, batch):
    errors = (velocity - (noise - batch["image"])).square().flatten(1).mean(1)
    return torch.where(batch.targets == -100, 0.0, errors).sum()
