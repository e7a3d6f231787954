"""Which sample comes when: global batches that are the same whatever the plan.

Step n of a run reads samples [n * G, (n + 1) * G) of its data set, G the global batch size. A plan
decides only which rank reads which of them, and in how many microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from titanlite.data.datasets import ImageDataset
from titanlite.errors import ConfigError

# The label that torch.nn.functional.cross_entropy leaves out by default.
IGNORE_INDEX = -100


class GlobalBatchSampler:
    """One data-parallel rank's part of every global batch.

    `state`, the global index of the next sample, is all there is to save and restore; it means
    the same under every plan. Raises ConfigError where the global batch does not divide evenly.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        global_batch_size: int,
        dp_degree: int,
        dp_rank: int,
        local_batch_size: int,
    ) -> None:
        if global_batch_size % (dp_degree * local_batch_size):
            raise ConfigError(
                f"training.global_batch_size: {global_batch_size} is not a multiple of "
                f"{dp_degree} data-parallel ranks x training.local_batch_size {local_batch_size}; "
                f"use a multiple of {dp_degree * local_batch_size}"
            )
        self.state = 0
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._rank_batch_size = global_batch_size // dp_degree
        self._dp_rank = dp_rank
        self._local_batch_size = local_batch_size

    def draw(self) -> list[torch.Tensor]:
        """This rank's microbatches of the next step, int64 [local_batch_size, T] each.

        The ranks' parts are disjoint and together are samples [state, state + global_batch_size),
        in rank order; `state` then moves on by the global batch size.
        """
        first = self.state + self._dp_rank * self._rank_batch_size
        self.state += self._global_batch_size
        return [
            _stack(self._dataset, range(start, start + self._local_batch_size))
            for start in range(first, first + self._rank_batch_size, self._local_batch_size)
        ]


def iterate_once(
    dataset: ImageDataset,
    *,
    local_batch_size: int,
    dp_degree: int,
    dp_rank: int,
    num_samples: int | None = None,
) -> Iterator[tuple[torch.Tensor, int]]:
    """Samples 0 .. num_samples - 1 once over all ranks: (tokens [local_batch_size, T], num_valid).

    Every rank yields the same number of batches of the same shape, so collectives match. Where
    the samples do not divide evenly, only the first `num_valid` rows of a batch count (0 is
    possible) and the others are filler; `make_targets(tokens, num_valid)` leaves those out.
    `num_samples` None, or more than the set holds, means the whole set. Raises ValueError where
    an endless data set is to be read whole.
    """
    total = dataset.num_samples if num_samples is None else num_samples
    if total is None:
        raise ValueError("an endless data set has no once: give num_samples")
    if dataset.num_samples is not None:
        total = min(total, dataset.num_samples)
    for start in range(0, total, dp_degree * local_batch_size):
        first = start + dp_rank * local_batch_size
        num_valid = min(max(total - first, 0), local_batch_size)
        # Filler repeats the last sample: real tokens, so no kernel meets a value out of range.
        rows = [min(i, total - 1) for i in range(first, first + local_batch_size)]
        yield _stack(dataset, rows), num_valid


def make_targets(tokens: torch.Tensor, num_valid: int | None = None) -> torch.Tensor:
    """The next pixel of each position: tokens [B, T] -> targets [B, T], int64.

    The last position has none and gets IGNORE_INDEX, as do all positions of rows from
    `num_valid` on. T - 1 targets a row count, and bits per dimension are over those.
    """
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = tokens[:, 1:]
    if num_valid is not None:
        targets[num_valid:] = IGNORE_INDEX
    return targets


def _stack(dataset: ImageDataset, indices: range | list[int]) -> torch.Tensor:
    return torch.stack([dataset.sample(index) for index in indices])
