"""A finite data set held in memory and read in epochs."""

import numpy as np
import torch

from titanlite.data.keyed_random import Orders, permutation


class StoredSequences:
    """N sequences; sample `i` is at position `i mod N` in the order of epoch `i // N`.

    `tokens` [N, ...] has any integer dtype; each row is flattened to a sequence. `shuffle_seed`
    shuffles each epoch by (seed, epoch); with None, every epoch keeps the order of the array.
    """

    def __init__(self, tokens: np.ndarray, *, shuffle_seed: int | None = None) -> None:
        self._sequences = tokens.reshape(len(tokens), -1)
        self._orders = Orders(permutation, shuffle_seed, len(tokens))

    @property
    def num_samples(self) -> int:
        return len(self._sequences)

    def sample(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._sequences[self._orders.place(index)].astype(np.int64))
