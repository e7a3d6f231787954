"""The sampler: global batches that do not depend on the plan.

A step of a run reads the samples [state, state + G) of its data set, where G is its global batch
size, which may change with the step. The plan only determines which rank reads which samples, and
in how many microbatches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.data.spec import Dataset
from titanlite.errors import ConfigError, TitanliteError, user_line
from titanlite.modules.batch import Batch, FieldDims, make_batch
from titanlite.modules.keyed import sample_keys


class GlobalBatchSampler:
    """The part of every global batch that one data-parallel rank reads.

    `state`, the global index of the next sample, is the only state to save and restore; it does not
    depend on the plan. `fields` are the fields of a sample besides its tokens, each with the
    dimension that counts tokens in it (see DatasetSpec). `seed` is that of the keys of the samples.
    """

    def __init__(
        self,
        dataset: Dataset,
        dp_degree: int,
        dp_rank: int,
        local_batch_size: int,
        fields: Mapping[str, int | None] | None = None,
        seed: int = 0,
    ) -> None:
        self.state = 0
        self._dataset = dataset
        self._dp_degree, self._dp_rank = dp_degree, dp_rank
        self._local_batch_size = local_batch_size
        self._fields = fields or {}
        self._seed = seed

    def draw(self, global_batch_size: int) -> list[Batch]:
        """This rank's batches of the next step, of `local_batch_size` sequences each.

        Concatenated in rank order, the parts of all ranks are the samples
        [state, state + global_batch_size). `state` then advances by the global batch size.
        """
        own, size = global_batch_size // self._dp_degree, self._local_batch_size
        first = self.state + self._dp_rank * own
        self.state += global_batch_size
        stop = first + own
        return [
            read_batch(self._dataset, range(start, start + size), self._fields, self._seed)
            for start in range(first, stop, size)
        ]


def iterate_once(
    dataset: Dataset,
    *,
    local_batch_size: int,
    dp_degree: int,
    dp_rank: int,
    num_samples: int | None = None,
    fields: Mapping[str, int | None] | None = None,
) -> Iterator[Batch]:
    """Read samples 0 .. num_samples - 1 once over all ranks, in batches of `local_batch_size`.

    Every rank yields the same number of batches of the same shape, so collectives match. If the
    samples do not divide evenly, the last rows of a batch (or all its rows) are padding without
    targets. `num_samples` None, or more than the set holds, means the whole set. Raises ValueError
    if the data set is endless and `num_samples` is None.
    """
    total = dataset.num_samples if num_samples is None else num_samples
    if total is None:
        raise ValueError("num_samples: the data set is endless; give the number of samples")
    if dataset.num_samples is not None:
        total = min(total, dataset.num_samples)
    for start in range(0, total, dp_degree * local_batch_size):
        first = start + dp_rank * local_batch_size
        num_valid = min(max(total - first, 0), local_batch_size)
        # Padding repeats the last sample, so that all tokens are valid.
        rows = [min(i, total - 1) for i in range(first, first + local_batch_size)]
        batch = read_batch(dataset, rows, fields or {})
        yield batch.leave_out(torch.arange(local_batch_size)[:, None] >= num_valid)


def read_batch(
    dataset: Dataset,
    indices: Iterable[int],
    fields: Mapping[str, int | None],
    seed: int | None = None,
) -> Batch:
    """The samples with these indices as a batch; tokens are numbered by index and position.

    The keys of the samples are functions of `seed` and index, or with None those of a validation
    set. Raises ConfigError if a sample does not have exactly the registered fields.
    """
    indices = list(indices)
    samples = [_sample(dataset, index) for index in indices]
    for sample in samples[:1]:
        if sample.keys() - {"tokens"} != fields.keys() - {"tokens"}:
            raise ConfigError(
                f"training.dataset: a sample has the fields {', '.join(sample)}, but the data set "
                f"is registered with {', '.join(fields) or 'tokens only'}; name in `fields` all "
                "but tokens"
            )
        if "targets" not in sample and "tokens" not in sample:
            raise ConfigError(
                "training.dataset: a sample without tokens needs `targets`, an integer per sample "
                "or token, with -100 where none counts"
            )
    stacked = {name: _stack(name, [sample[name] for sample in samples]) for name in samples[0]}
    keys = sample_keys(torch.tensor(indices), seed)
    if "tokens" not in stacked:
        dims = {name: _dims_of(fields[name]) for name in stacked}
        return Batch({**stacked, "sample_keys": keys}, {**dims, "sample_keys": FieldDims(0, None)})
    more = {
        name: (stacked[name], _dims_of(dim))
        for name, dim in fields.items()
        if name not in ("targets", "positions")
    }
    seq_len = stacked["tokens"].size(1)
    numbers = torch.tensor(indices)[:, None] * seq_len + torch.arange(seq_len)
    more["token_numbers"] = (numbers, FieldDims(0, 1))
    more["sample_keys"] = (keys, FieldDims(0, None))
    return make_batch(
        stacked["tokens"], stacked.get("targets"), stacked.get("positions"), more=more
    )


def _sample(dataset: Dataset, index: int) -> Mapping[str, Tensor]:
    """The fields of a sample; raises ConfigError if the data set fails."""
    try:
        sample = dataset.sample(index)
        return {"tokens": sample} if isinstance(sample, Tensor) else sample
    except TitanliteError:
        raise
    except Exception as error:  # a user's data set may raise anything
        where = f" ({line})" if (line := user_line(error)) else ""
        raise ConfigError(
            f"training.dataset: sample({index}) of {type(dataset).__name__} raises "
            f"{type(error).__name__}: {error}{where}; correct the data set"
        ) from error


def _stack(name: str, values: Sequence[Any]) -> Tensor:
    """One field of several samples; raises ConfigError if they are not tensors of one shape."""
    for value in values:
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"training.dataset: the field `{name}` of a sample is "
                f"{type(value).__name__} {value!r}; make it a tensor"
            )
        if value.shape != values[0].shape:
            raise ConfigError(
                f"training.dataset: the field `{name}` has the shapes {list(values[0].shape)} and "
                f"{list(value.shape)} in two samples of a batch; pad or cut them to one shape"
            )
    return torch.stack(list(values))


def _dims_of(sequence: int | None) -> FieldDims:
    """The dimensions of a stacked field whose samples have the token dimension `sequence`."""
    return FieldDims(0, None if sequence is None else sequence + 1)
