"""Note 4: the gradient of the whole batch if ranks have unequal parts of it."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def uneven_batches(device, gradient, num_rows):
    """The gradient of the mean loss over all rows, where this rank has `num_rows` of them.

    `gradient` is that of the mean loss over this rank's own rows. Use device.all_reduce; the mean
    of the ranks' gradients is right only if all have the same number of rows.
    """
    weighted = torch.cat([gradient * num_rows, torch.tensor([float(num_rows)])])
    total = device.all_reduce(weighted)
    return total[:-1] / total[-1]


ROWS = [1, 2, 5, 8]


def expected(inputs):
    total = sum(gradient * rows for gradient, rows in inputs) / sum(ROWS)
    return [total] * 4


EXERCISE = Exercise(
    solution=uneven_batches,
    hint="Weight each gradient with its rows, and divide the sum by the sum of rows, which can "
    "travel in the same all-reduce.",
    inputs=lambda rank: (torch.tensor([1.0, 3.0, -2.0]) * (rank + 1), ROWS[rank]),
    expected=expected,
)
