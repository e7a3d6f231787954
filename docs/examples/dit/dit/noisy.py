# dit/noisy.py
import torch

from .data import Digits


class NoisyDigits(Digits):
    def sample(self, index):
        # A validation set does not depend on the seed.
        seed = self.seed * 1_000_003 + index if self.is_training else -1 - index
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, 8, 8, generator=generator)
        time = torch.rand((), generator=generator)
        return {**super().sample(index), "noise": noise, "time": time}
