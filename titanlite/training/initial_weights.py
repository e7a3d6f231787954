"""Initial weights that do not depend on the plan.

A model with `init_parameter` is initialized one parameter at a time: each is drawn at its full
shape from its own generator, seeded by the job's seed and the parameter's canonical name, and the
rank keeps its shard. DTensor's own random operators would give every shard the same numbers on CPU.
Any other model is built whole on the CPU, once per machine, and each rank copies its shards.
"""

import contextlib
import hashlib
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from titanlite.errors import TitanliteError
from titanlite.modules.dropout import TokenDropout
from titanlite.modules.lora import LoRALinear, adapted_layer
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import local_part, shard_of
from titanlite.modules.tied import find_tied, tie
from titanlite.ranks.peers import Peers
from titanlite.ranks.temporary import save_temporary
from titanlite.ranks.world import World

# The largest model, in bytes of its parameters, that is built whole on the CPU of each machine.
LARGEST_WHOLE = 64 << 30
# The most bytes of values that a rank on a GPU draws at a time.
MOST_DRAWN = 8 << 30


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    tied: Mapping[str, str] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Allocate, on `device`, a model that was built on "meta", and give it its initial values.

    `values` maps names, before the model is parallelized, to whole parameters and buffers, of which
    each rank copies its shards. Without it, values depend only on `seed` and the parameter's name,
    not on the plan or the device: they are drawn on the CPU in float32, one full parameter in
    memory at a time (for a GPU, up to MOST_DRAWN bytes). The model can define `init_parameter(name,
    parameter, generator)`; by default, matrices are normal with standard deviation 0.02, vectors
    one if they are called weight, else zero. A model sets its buffers in `init_buffers()`.

    A tied weight is drawn once, by its first name. A pipeline stage may hold it under a further
    one: give find_tied of the whole model as `tied`. Adapters (LoRALinear) are always drawn.
    """
    plain: Any = _plain_model(model)
    draw = _draw_of(model, getattr(plain, "init_parameter", _init_parameter))
    tied_here = find_tied(model)
    model.to_empty(device=device)
    tie(model, tied_here)
    parameters = []
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        name = (tied or {}).get(name, name)
        parameters.append((name, parameter))
    given = values or {}
    is_own = type(plain).__module__.startswith("titanlite.models.")
    at_once = is_own and device.type == "cuda" and _get_current_dispatch_mode() is None
    shapes = [(name, parameter.shape) for name, parameter in parameters if name not in given]
    drawn = _drawn(shapes, draw, seed, torch.get_num_threads() if at_once else 1)
    for name, parameter in parameters:
        full = given[name] if name in given else next(drawn)
        local_part(parameter).copy_(shard_of(full, parameter))
    if values is None:
        init_buffers(model, seed)
        return
    for name, buffer in model.named_buffers():
        local_part(buffer).copy_(shard_of(values[canonical_name(name)], buffer))
    _set_dropout_keys(model, seed)


Draw = Callable[[str, Tensor, torch.Generator], None]


def _draw_of(model: nn.Module, draw: Draw) -> Draw:
    """`draw`, but the adapters of `model` draw their own values."""
    adapted = {
        canonical_name(name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, LoRALinear)
    }

    def one(name: str, full: Tensor, generator: torch.Generator) -> None:
        layer = adapted_layer(name)
        if layer is None or layer not in adapted:
            draw(name, full, generator)
        else:
            adapted[layer].init_adapter(name.split(".")[-2], full, generator)

    return one


def _drawn(
    shapes: Sequence[tuple[str, torch.Size]], draw: Draw, seed: int, num_threads: int
) -> Iterator[Tensor]:
    """The initial values of parameters, in order; torch draws normal numbers on one thread."""

    @torch.no_grad()
    def one(name: str, shape: torch.Size) -> Tensor:
        full = torch.empty(shape, dtype=torch.float32)
        draw(name, full, generator_for(seed, name))
        return full

    if num_threads == 1:
        yield from (one(name, shape) for name, shape in shapes)
        return
    waiting: deque[tuple[int, Future[Tensor]]] = deque()
    held = 0
    with ThreadPoolExecutor(num_threads) as pool:
        for name, shape in shapes:
            size = 4 * shape.numel()
            while waiting and held + size > MOST_DRAWN:
                first, drawn = waiting.popleft()
                held -= first
                yield drawn.result()
            waiting.append((size, pool.submit(one, name, shape)))
            held += size
        yield from (drawn.result() for _, drawn in waiting)


@contextlib.contextmanager
def whole_values(build: Callable[[], nn.Module], world: World) -> Iterator[Mapping[str, Tensor]]:
    """Inside, the parameters and buffers of the whole model that `build` returns, by name.

    The first rank of each machine calls `build` and stores the values in a temporary file, which
    the other ranks of the machine map into memory. Every rank of the world must call this.
    """
    if world.size == 1:
        yield _values_of(build())
        return
    token = Peers().from_first(secrets.token_hex)
    path = Path(tempfile.gettempdir()) / f"titanlite-initial-{token}.pt"

    def store() -> None:
        if world.local_rank == 0:
            path.touch(0o600, exist_ok=False)
            save_temporary(_values_of(build()), path)

    try:
        # All ranks learn whether every machine has its file before any maps it.
        Peers().all_do(store)
        values = torch.load(path, mmap=True, weights_only=True)
        Peers().gathered(None)  # all ranks have mapped it
    finally:
        # A mapped file keeps its content without its name.
        if world.local_rank == 0:
            path.unlink(missing_ok=True)
    yield values


def init_buffers(model: nn.Module, seed: int) -> None:
    """Give the buffers of a model, or of a part of one, their initial values.

    Raises TitanliteError if the model has buffers other than TokenDropout's and no
    `init_buffers()`.
    """
    if has_buffers(model):
        plain: Any = _plain_model(model)
        if not hasattr(plain, "init_buffers"):
            raise TitanliteError(
                f"{type(plain).__name__} has buffers; give it init_buffers(), which sets their "
                "values"
            )
        plain.init_buffers()
    _set_dropout_keys(model, seed)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to `device`: CPU offload keeps only parameters on the CPU."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def has_buffers(model: nn.Module) -> bool:
    """Whether the model has buffers other than the keys of TokenDropout."""
    keys = {id(m.key) for m in model.modules() if isinstance(m, TokenDropout)}
    return any(id(buffer) not in keys for buffer in model.buffers())


def draws_by_name(model: nn.Module) -> bool:
    """Whether the model class initializes its parameters one by one, and its buffers if any."""
    plain: Any = _plain_model(model)
    return hasattr(plain, "init_parameter") and (
        not has_buffers(model) or hasattr(plain, "init_buffers")
    )


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by (seed, name)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _set_dropout_keys(model: nn.Module, seed: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, TokenDropout):
            module.set_key(seed, canonical_name(name))


def _values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        canonical_name(name): tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def _plain_model(model: Any) -> Any:
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model


def _init_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if parameter.ndim > 1:
        parameter.normal_(0.0, 0.02, generator=generator)
    else:
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)
