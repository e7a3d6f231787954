"""A finite data set held in memory and read in epochs."""

from __future__ import annotations

import numpy as np
import torch

from titanlite.data.keyed_random import of_two_epochs, permutation


class StoredSequences:
    """N sequences; sample `i` is at position `i mod N` in the order of epoch `i // N`.

    `tokens` [N, ...] has any integer dtype; each row is flattened to a sequence. `shuffle_seed`
    shuffles each epoch by (seed, epoch); with None, every epoch keeps the order of the array.
    """

    def __init__(self, tokens: np.ndarray, *, shuffle_seed: int | None = None) -> None:
        self._sequences = tokens.reshape(len(tokens), -1)
        self._shuffle_seed = shuffle_seed
        self._order = of_two_epochs(permutation)

    @property
    def num_samples(self) -> int:
        return len(self._sequences)

    def sample(self, index: int) -> torch.Tensor:
        epoch, position = divmod(index, self.num_samples)
        if self._shuffle_seed is not None:
            position = int(self._order(self._shuffle_seed, epoch, self.num_samples)[position])
        return torch.from_numpy(self._sequences[position].astype(np.int64))
