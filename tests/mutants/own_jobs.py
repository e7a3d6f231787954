"""Data and models for the losses that a job names; jobs of mutants import it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import titanlite


@dataclass(frozen=True)
class Sizes:
    dim: int = 8


class Rows:
    num_samples = None

    def __init__(self, **_: Any) -> None:
        self.generator = torch.Generator()

    def sample(self, index: int) -> dict[str, Tensor]:
        first, second = torch.randn(2, 8, generator=self.generator.manual_seed(index))
        number = torch.tensor(index % 8)
        return {"first": first, "second": second, "targets": number, "weights": number + 0.7}


class Numbers(Rows):
    def sample(self, index: int) -> dict[str, Tensor]:
        return {**super().sample(index), "targets": torch.full((8,), 0.1 * (index % 5))}


class One(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, sizes.dim), nn.Linear(sizes.dim, 8)

    def forward(self, first: Tensor) -> Tensor:
        return self.down(self.up(first).tanh())


class Two(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.one, self.other = One(sizes), One(sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return self.one(first), self.other(second), self.scale.exp()


for _loss, _model, _data in (
    ("squared_error", One, Numbers),
    ("contrastive", Two, Rows),
    ("weighted_cross_entropy", One, Rows),
):
    titanlite.register_model(_loss, _model, Sizes)
    titanlite.register_dataset(
        _loss, _data, has_tokens=False, fields=dict.fromkeys(_data().sample(0))
    )
