"""Initial weights that do not depend on the plan.

Each parameter is drawn at its full shape from its own generator, seeded by the job's seed and the
parameter's canonical name. The rank then keeps its shard. DTensor's own random operators would give
every shard the same numbers on CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.dropout import TokenDropout
from titanlite.errors import TitanliteError
from titanlite.names import canonical_name
from titanlite.tied import find_tied, tie
from titanlite.training.shards import local_part, shard_of


@torch.no_grad()
def initialize(
    model: nn.Module, seed: int, device: torch.device, tied: Mapping[str, str] | None = None
) -> None:
    """Allocate a model built on "meta" on `device` and give it its initial values.

    Values depend only on `seed` and the parameter's name, not on the plan or the device: they are
    drawn on the CPU in float32, with one full parameter in memory at a time. The model can define
    `init_parameter(name, parameter, generator)`. By default matrices are normal with standard
    deviation 0.02; vectors are one if they are called weight, else zero. A model with buffers sets
    them in `init_buffers()`; every TokenDropout gets its key here.

    A tied weight is drawn once, by its first name. For a pipeline stage, `tied` is find_tied of the
    whole model: the stage may have a further name of a weight.
    """
    plain: Any = _plain_model(model)
    draw = getattr(plain, "init_parameter", _init_parameter)
    tied_here = find_tied(model)
    model.to_empty(device=device)
    tie(model, tied_here)
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        name = (tied or {}).get(name, name)
        full = torch.empty(parameter.shape, dtype=torch.float32)
        draw(name, full, generator_for(seed, name))
        local_part(parameter).copy_(shard_of(full, parameter))
    init_buffers(model, seed)


def init_buffers(model: nn.Module, seed: int) -> None:
    """Give the buffers of a model, or of a part of one, their initial values.

    Raises TitanliteError if the model has buffers other than TokenDropout's and no
    `init_buffers()`.
    """
    dropouts = {
        canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, TokenDropout)
    }
    keys = {id(dropout.key) for dropout in dropouts.values()}
    if any(id(buffer) not in keys for buffer in model.buffers()):
        plain: Any = _plain_model(model)
        if not hasattr(plain, "init_buffers"):
            raise TitanliteError(
                f"{type(plain).__name__} has buffers; give it init_buffers(), which sets their "
                "values"
            )
        plain.init_buffers()
    for name, dropout in dropouts.items():
        dropout.set_key(seed, name)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _plain_model(model: Any) -> Any:
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def _init_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if parameter.ndim > 1:
        parameter.normal_(0.0, 0.02, generator=generator)
    else:
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)
