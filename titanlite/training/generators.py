"""The seeds of a rank's random generators: a function of the job's seed, the step and the rank.

Nothing of them has to be saved: a resumed run draws what the uninterrupted one draws.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Generators:
    """Seeds torch's default generators on the CPU and the GPU, Python's `random` and NumPy's.

    `data_rank`, `token_rank` and `stage` are this rank's places among the ranks with other samples,
    other tokens and other pipeline stages. Ranks that differ only on the tp axis get equal seeds,
    since they hold the same activations; titanlite/draws.py makes them draw different numbers where
    they hold shards.
    """

    seed: int
    data_rank: int
    token_rank: int
    stage: int
    device: torch.device
    first_sample: int = 0
    """The number of the first sample of the step."""

    def start_reading(self, first_sample: int) -> None:
        """Before a batch is read: equal on all ranks that read the same samples."""
        self.first_sample = first_sample
        self._start("samples", first_sample, self.data_rank)

    def start_step(self, number: int) -> None:
        """Before the forward pass of step `number`.

        The samples are part of the seed too: a checkpoint may be loaded without one of the two.
        """
        place = self.data_rank, self.token_rank, self.stage
        self._start("step", number, self.first_sample, *place)

    def start_validation(self) -> None:
        """Before a validation: the same in each, so that their losses can be compared."""
        self._start("validation", self.data_rank, self.token_rank, self.stage)

    def _start(self, *key: str | int) -> None:
        text = ":".join(map(str, ("generators", self.seed, *key)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        # Not torch.manual_seed, which queues calls for GPUs that this process does not use.
        torch.default_generator.manual_seed(seed >> 1)
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed % 2**32)
