"""The seeds of a rank's random generators: a function of the job's seed, the step and the rank.

Nothing of them has to be saved: a resumed run draws what the uninterrupted one draws.
"""

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from titanlite.modules.draws import default_generators, generator_states


@dataclass
class Generators:
    """Seeds torch's default generators on the CPU and the GPU, Python's `random` and NumPy's.

    `data_rank`, `token_rank` and `stage` are this rank's places among the ranks with other samples,
    other tokens and other pipeline stages. Ranks that differ only on the tp axis get equal seeds,
    since they hold the same activations; modules/draws.py makes them draw different numbers where
    they hold shards.
    """

    seed: int
    data_rank: int
    token_rank: int
    stage: int
    device: torch.device
    first_sample: int = 0
    """The number of the first sample of the step."""
    has_drawn: bool = False
    """Whether a step has drawn from torch's generators."""
    _fresh: list[bytes] = field(default_factory=list)

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
        self._fresh = generator_states(self.device)

    def end_step(self) -> None:
        """After the backward pass of a step: notes in `has_drawn` whether it has drawn."""
        self.has_drawn = self.has_drawn or generator_states(self.device) != self._fresh

    def start_validation(self) -> None:
        """Before a validation: the same in each, so that their losses can be compared."""
        self._start("validation", self.data_rank, self.token_rank, self.stage)

    def _start(self, *key: str | int) -> None:
        text = ":".join(map(str, ("generators", self.seed, *key)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        # Not torch.manual_seed, which queues calls for GPUs that this process does not use.
        for generator in default_generators(self.device):
            generator.manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed % 2**32)
