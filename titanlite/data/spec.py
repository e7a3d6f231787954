"""What a job has to know of a data set before it reads any: a DatasetSpec; torch-free.

Data, model, loss and sampling share a sequence of tokens: its length, its vocabulary, and the
fields that go with it. What else the tokens are, such as the pixels of an image, is known to the
data set's own spec alone: which models it fits, how it is built, how its samples are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from titanlite.models import load

if TYPE_CHECKING:
    from torch import Tensor


class Dataset(Protocol):
    """Sequences by global sample index."""

    @property
    def num_samples(self) -> int | None:
        """Sequences in one epoch; None where the samples are endless, as random crops are."""

    def sample(self, index: int) -> Tensor | Mapping[str, Tensor]:
        """Sample `index` >= 0: its tokens, int64 [T]; or its fields by name, "tokens" among them.

        A pure function of (seed, index). Indices of a finite training set run on over epochs,
        each in an order of its own; a validation set repeats in one order.
        """


@dataclass(frozen=True)
class Misfit:
    """Why a model and a data set do not go together."""

    has: str
    """What the data set has, such as "images of 8 x 8 x 1 and 17 values"."""
    takes: str
    """What the model takes."""
    changes: tuple[str, ...]
    """What would have to change, such as "model.image_height to 8"."""


@dataclass(frozen=True)
class DatasetSpec:
    """A data set as a job names it; one that fits some models alone is of a subclass.

    What reads data is named as "module:function" and imported when first asked for, so that a spec
    needs neither torch nor numpy; a function itself will do too. `build` makes the data set:
    `build(model=..., seq_len=..., split=..., seed=..., path=..., path_key=...)` gives a
    Dataset whose samples have `seq_len` tokens, for the model of the sizes `model`. `split` is
    "train" or "validation"; the two share no sample, and validation is finite and does not depend
    on `seed`. It raises ConfigError, naming `path_key`, for files that are missing or damaged.
    `vocab_size` is how many tokens the data needs; None where it takes any model's.
    """

    name: str
    description: str
    build: str | Callable[..., Dataset]
    vocab_size: int | None = None
    needs_path: bool = False
    fields: Mapping[str, int | None] = field(default_factory=dict)
    """Fields of a sample beside its tokens: name -> which dimension counts tokens, None for none.
    A model takes each by its name; "targets" and "positions" replace those of the next token."""
    loss: str = "titanlite.training.loss:NEXT_TOKEN"
    """The Loss that such samples are trained with, as "module:attribute"."""
    sample_name: str = "sequence"
    token_name: str = "token"
    """What a sample and one of its tokens are called where a person reads of them."""
    prompt_length: int = 1
    """Tokens of a sample that sampling begins with: nothing before the first one predicts it."""
    samples_file: str = "samples.txt"
    """Where a run shows what was sampled."""
    show: str | Callable[..., None] = "titanlite.data.spec:write_numbers"
    """What writes that file: `show(path, sampled, real, model=..., title=...)`, tensors [N, T]."""
    least_sizes: Mapping[str, int] = field(default_factory=dict)
    """Fields of a model's configuration -> the least that keeps such samples what they are."""

    def seq_len(self, model: Any) -> int | None:
        """The length of a sample for a model of these sizes; None where it may have any."""
        return None

    def misfit(self, model: Any, seq_len: int) -> Misfit | None:
        """What keeps a model of these sizes from reading it; None where it fits."""
        if self.vocab_size is None or model.vocab_size >= self.vocab_size:
            return None
        return Misfit(
            f"{self.vocab_size} values",
            f"{model.vocab_size}",
            (f"model.vocab_size to {self.vocab_size}",),
        )

    def make(self, *, model: Any, seq_len: int, **arguments: Any) -> Dataset:
        """Call `build`."""
        return self.builder(model=model, seq_len=seq_len, **arguments)

    @property
    def builder(self) -> Callable[..., Dataset]:
        return load(self.build) if isinstance(self.build, str) else self.build

    def save_samples(
        self, path: Path, sampled: Tensor, real: Tensor, *, model: Any, title: str
    ) -> None:
        """Write sampled sequences [N, T] and as many real ones for a person to look at."""
        show = load(self.show) if isinstance(self.show, str) else self.show
        path.parent.mkdir(parents=True, exist_ok=True)
        show(path, sampled, real, model=model, title=title)


def write_numbers(path: Path, sampled: Tensor, real: Tensor, *, model: Any, title: str) -> None:
    """Sequences as lines of numbers: what is left where nobody says what tokens mean."""
    with path.open("w", encoding="utf-8") as file:
        for kind, sequences in (("sampled", sampled), ("real", real)):
            for tokens in sequences.tolist():
                print(kind, *tokens, file=file)
