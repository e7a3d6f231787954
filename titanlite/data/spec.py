"""DatasetSpec: the description of a data set that a job needs before it reads data. No torch.

Data, model, loss and sampling all work on sequences of tokens, with a length, a vocabulary and
fields. What the tokens mean, such as the pixels of an image, is known only to the spec of the data
set: which models fit it, how it is built, and how its samples are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titanlite.errors import ConfigError
from titanlite.registry import load

if TYPE_CHECKING:
    from torch import Tensor


# The loss of data sets that name no other.
NEXT_TOKEN = "titanlite.training.loss:NEXT_TOKEN"
# The keys of [training] that it takes.
NEXT_TOKEN_KEYS = ("label_smoothing", "z_loss")
# The cross-entropy of targets with a weight each, the field "weights".
WEIGHTED = "weighted_cross_entropy"


class Dataset(Protocol):
    """A data set: sequences by global sample index."""

    @property
    def num_samples(self) -> int | None:
        """The number of sequences in one epoch; None if endless, such as random crops."""

    def sample(self, index: int) -> Tensor | Mapping[str, Tensor]:
        """Sample `index` >= 0: its tokens, int64 [T], or its fields by name, including "tokens".

        A pure function of (seed, index). Indices of a finite training set continue over epochs,
        each epoch in a different order; a validation set repeats in the same order.
        """


@dataclass(frozen=True)
class Misfit:
    """Why a model and a data set do not match."""

    has: str
    """What the data set has, such as "images of 8 x 8 x 1 and 17 values"."""
    takes: str
    """What the model accepts."""
    changes: tuple[str, ...]
    """What must change, such as "model.image_height to 8"."""


@dataclass(frozen=True)
class JobKeys:
    """The keys of a job that a data set may depend on, besides those of its own section."""

    hf_assets_path: str | None = None
    """The folder of a text tokenizer."""
    attend_across_documents: bool = True
    validates_elsewhere: bool = False
    """Whether [validation] names other data, so nothing of the training data is held out."""
    dump_folder: str = "."


@dataclass(frozen=True)
class DatasetSpec:
    """The spec of a data set. A data set that fits only some models has a subclass.

    Functions are given as "module:function" and imported on first use, so a spec needs neither
    torch nor numpy; a function object is accepted too. `build(model=..., seq_len=..., split=...,
    seed=..., path=..., path_key=...)` returns a Dataset whose samples have `seq_len` tokens, for a
    model with the configuration `model`. `split` is "train" or "validation"; the two share no
    sample, and validation is finite and does not depend on `seed`. `build` raises ConfigError,
    which names `path_key`, if files are missing or damaged. `vocab_size` is the vocabulary size
    that the data needs; None if any works.
    """

    name: str
    description: str
    build: str | Callable[..., Dataset]
    vocab_size: int | None = None
    needs_path: bool = False
    takes_path: bool = False
    """Whether a path may be given, though none is needed."""
    accepts_file: bool = False
    """Whether the path may be a single file; otherwise it is a folder."""
    accepts_name: bool = False
    """Whether the path may be a name, such as "owner/name", instead of a folder."""
    default_path: str | None = None
    """The folder if the job gives none, relative to the working directory, where it exists."""
    fields: Mapping[str, int | None] = field(default_factory=dict)
    """Fields of a sample besides its tokens: name -> dimension that counts tokens, None if none.
    The model receives each by name; "targets" and "positions" replace the next-token defaults."""
    loss: str = NEXT_TOKEN
    """The Loss to train on these samples, as "module:attribute"."""
    sample_name: str = "sequence"
    token_name: str = "token"
    """The words for a sample and for a token in messages to users."""
    has_tokens: bool = True
    """Whether samples have tokens. If not, the first field of a sample is the model's input, and
    "targets" is one of its fields; nothing can be sampled."""
    bits_name: str = "token"
    """The name of a token in figures of bits: "bits/token", "bits/dim"."""
    sampled_as: str | None = None
    """A data set that needs no path and can replace this one where a model is only sampled from."""
    reads_tokenizer: bool = False
    """Whether it depends on model.hf_assets_path."""
    prompt_length: int = 1
    """The number of given tokens that sampling starts from; the first token has no predecessor."""
    samples_file: str = "samples.txt"
    """The file to which a run writes its samples."""
    show: str | Callable[..., None] = "titanlite.data.spec:write_numbers"
    """Writes that file: `show(path, sampled, real, model=..., title=...)`, tensors [N, T]."""
    least_sizes: Mapping[str, int] = field(default_factory=dict)
    """Fields of a model's configuration -> the smallest value at which samples keep their form."""

    def for_job(self, keys: JobKeys) -> DatasetSpec:
        """The spec for a job with these keys. Raises ConfigError if it cannot do what they ask."""
        if not keys.attend_across_documents:
            raise ConfigError(
                f'training.attend_across_documents: "{self.name}" has no documents; remove this '
                "key, or train on text"
            )
        return self

    def prepare(self, **arguments: Any) -> None:
        """Do once what `make` with these arguments would do on every rank, before ranks start."""

    def measures(self, loss_nats: float, dataset: Dataset) -> Mapping[str, float]:
        """Figures that follow from a validation loss in nats per token, by name.

        A name with "_per_" is a number with a unit, such as "bits_per_dim".
        """
        return {f"bits_per_{self.bits_name}": loss_nats / math.log(2)} if self.is_in_nats else {}

    @property
    def is_in_nats(self) -> bool:
        """Whether `loss` is in nats per token."""
        return self.has_tokens and self.loss == NEXT_TOKEN

    def start_tokens(self, prompt: str) -> list[int] | None:
        """The tokens of a text to continue; None if samples start like those of the data set."""
        if prompt:
            raise ConfigError(f'sampling.prompt: "{self.name}" is not text; remove this key')
        return None

    def texts(self, sampled: Tensor) -> list[str]:
        """Samples [N, T] as text; empty if they are not text."""
        return []

    @property
    def end_token(self) -> int | None:
        """The token after which a sample has ended; None if all have the same length."""
        return None

    def seq_len(self, model: Any) -> int | None:
        """The length of a sample for this model configuration; None if any length works."""
        return None

    def misfit(self, model: Any, seq_len: int) -> Misfit | None:
        """Why this model configuration cannot read the data set; None if it can."""
        takes = getattr(model, "vocab_size", None)
        if self.vocab_size is None or takes is None or takes >= self.vocab_size:
            return None
        return Misfit(
            f"{self.vocab_size} values", f"{takes}", (f"model.vocab_size to {self.vocab_size}",)
        )

    def make(self, *, model: Any, seq_len: int, **arguments: Any) -> Dataset:
        """Build the data set: calls `build`."""
        return self.builder(model=model, seq_len=seq_len, **arguments)

    @property
    def builder(self) -> Callable[..., Dataset]:
        return load(self.build)

    def save_samples(
        self, path: Path, sampled: Tensor, real: Tensor, *, model: Any, title: str
    ) -> None:
        """Write sampled and real sequences, both [N, T], to a file for people to look at."""
        path.parent.mkdir(parents=True, exist_ok=True)
        load(self.show)(path, sampled, real, model=model, title=title)


def write_numbers(path: Path, sampled: Tensor, real: Tensor, *, model: Any, title: str) -> None:
    """Write sequences as lines of numbers: the default for tokens without a known meaning."""
    with path.open("w", encoding="utf-8") as file:
        for kind, sequences in (("sampled", sampled), ("real", real)):
            for tokens in sequences.tolist():
                print(kind, *tokens, file=file)
