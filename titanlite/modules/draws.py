"""What a model draws from torch's own generators, and how ranks of tp draw there.

A draw depends on the plan: each rank draws the numbers of its own part of a batch. `find_draws`
finds the modules that draw, and `separate_draws` makes ranks of tp draw different numbers where
they hold different shards, and equal ones where they hold the same activation. Numbers that are
functions of the sample (keyed.py) or of the token (dropout.py) are no draws.
"""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from titanlite.errors import ConfigError
from titanlite.modules.names import canonical_name
from titanlite.ranks.settings import generators_restored

LOSS = "the loss"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draws:
    """The modules that draw from torch's generators, or Python's or NumPy's, in training.

    `shapes` maps the canonical name of a module ("" is the model, LOSS the loss) to the shapes of
    the draws of its first call, in their order; None if the model could not be run to see them.
    """

    shapes: Mapping[str, Sequence[Shape] | None] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    """The class of each module."""

    def describe(self) -> str:
        """The modules and their classes, such as "blocks.*.dropout (Dropout) and the loss"."""
        names: dict[str, None] = {}
        for name in self.shapes:
            short = ".".join("*" if part.isdigit() else part for part in name.split("."))
            kind = self.classes.get(name)
            names[name if kind is None else f"{short} ({kind})" if name else kind] = None
        listed = list(names)
        if len(listed) > 3:
            listed = [*listed[:3], f"{len(listed) - 3} more"]
        return " and ".join([", ".join(listed[:-1]), listed[-1]] if listed[1:] else listed)

    @property
    def verb(self) -> str:
        return "draws" if len(self.describe().split(" and ")) == 1 else "draw"


def find_draws(model: nn.Module, run: Callable[[nn.Module], Callable[[], Any]]) -> Draws:
    """The modules that draw when `run` runs a copy of `model`, and then its loss.

    `run(model)` runs a forward pass and returns a function that computes the loss. The model may be
    on "meta". If it does not run there, its modules are searched for those that draw by their
    class; a ConfigError is raised all the same. The generators are left as they were.
    """
    classes = {canonical_name(name): type(m).__name__ for name, m in model.named_modules()}
    watch = _DrawWatch()
    found = watch.found
    with generators_restored(), torch.no_grad():
        before = _states_outside_torch()
        try:
            # A forward pass may keep tensors in the model.
            copied = copy.deepcopy(model)
            with inside_modules(copied) as watch.inside, watch:
                loss = run(copied)
                watch.inside[:] = [(LOSS, 0)]
                loss()
        except ConfigError:
            raise
        except Exception:  # any operator of a user's model may need values
            found |= dict.fromkeys(_drawing_modules(model))
        if _states_outside_torch() != before:
            found.setdefault("", None)
    return Draws(found, {name: classes[name] for name in found if name in classes})


def _states_outside_torch() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def _drawing_modules(model: nn.Module) -> Iterator[str]:
    """The names of the modules whose class draws in training."""
    for name, module in model.named_modules():
        draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        draws |= isinstance(module, nn.RReLU) and module.lower != module.upper
        draws |= isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        draws |= isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        if draws:
            yield canonical_name(name)


@contextlib.contextmanager
def inside_modules(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    """Inside, a stack of the modules whose forward is running: name, and number of the call."""
    inside: list[tuple[str, int]] = []
    calls: dict[str, int] = {}

    def enter(name: str) -> None:
        inside.append((name, calls.get(name, 0)))
        calls[name] = calls.get(name, 0) + 1

    hooks: list[Any] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.RecursiveScriptModule):  # It takes no hooks.
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            hooks.append(module.register_forward_hook(lambda *_: (inside.pop(), None)[1]))
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def is_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an operator draws from a default generator.

    Dropout with probability 0, or outside of training, draws nothing: the CPU's attention is tagged
    as random even without dropout.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if func is torch.ops.aten._fused_sdp_choice.default:
        return False
    for place, argument in enumerate(func._schema.arguments):
        name = argument.name
        value = args[place] if place < len(args) else kwargs.get(name, argument.default_value)
        if name == "generator" and value is not None:
            return False
        if name in ("p", "dropout_p", "dropout") and value == 0:
            return False
        if name in ("train", "training", "is_training") and value is False:
            return False
    return True


def _shape_of(func: Any, args: Sequence[Any]) -> Shape:
    """The shape that tells a shard from the whole: of the first tensor, or the size that is asked.

    Kernels of attention differ in what they drop, so the last dimension is left out there.
    """
    first = next((arg for arg in args if isinstance(arg, Tensor | list | tuple)), ())
    shape = tuple(first.shape) if isinstance(first, Tensor) else tuple(first)
    return shape[:-1] if "attention" in func._schema.name else shape


class _DrawWatch(TorchDispatchMode):
    """Records the draws of each innermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Shape] | None] = {}
        self.inside: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_draw(func, args, kwargs):
            name, call = self.inside[-1] if self.inside else ("", 0)
            of_module = self.found.setdefault(canonical_name(name), [])
            if call == 0 and of_module is not None:
                of_module.append(_shape_of(func, args))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # The model asks for a value, mostly to choose a branch.
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **kwargs)


def separate_draws(
    parts: Sequence[nn.Module],
    draws: Draws,
    place: int,
    device: torch.device,
    *,
    blocks: str,
    blocks_are_sharded: bool,
) -> str:
    """Make this rank of tp, number `place`, draw numbers of its own where it holds a shard.

    The default generators of the ranks of tp must be in equal states. A draw whose shape is that of
    the plain model, as `draws` has it, is of a replicated activation and equal on all ranks; any
    other is of a shard. Where the shapes are not known, which are those of a compiled block or of a
    model that does not run on "meta", the draws in `blocks` are those of shards if
    `blocks_are_sharded`, as under sequence parallelism. Returns what is not decided by shapes, in
    words.
    """
    compiled = False
    for part in parts:
        # The last module of a name is the plain one, inside of its wrappers.
        modules = {canonical_name(name): module for name, module in part.named_modules()}
        whole = {
            canonical_name(name): module
            for name, module in part.named_modules()
            if isinstance(module, torch._dynamo.OptimizedModule)
        }
        by_block = {
            block for block in whole for name in draws.shapes if f"{name}.".startswith(f"{block}.")
        }
        compiled |= bool(by_block)
        for block in by_block if blocks_are_sharded else ():
            _apart(whole[block], _on_own_stream(place, device))
        mode = _ByShape(place, device)
        for name, shapes in draws.shapes.items():
            module = modules.get(name)
            holds = any(f"{block}.".startswith(f"{name}." if name else "") for block in whole)
            if module is None or holds or any(f"{name}.".startswith(f"{b}.") for b in whole):
                continue
            otherwise = blocks_are_sharded and f"{name}.".startswith(f"{blocks}.")
            _apart(module, mode.inside(shapes or (), otherwise))
    if not compiled:
        return ""
    kind = "different" if blocks_are_sharded else "equal"
    return f"in compiled blocks, ranks of tp draw {kind} numbers"


def _apart(module: Any, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Run the module's forward in training inside `context()`."""
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Batches of a validation have other shapes than those of training.
        with context() if module.training else contextlib.nullcontext():
            return plain(*args, **kwargs)

    module.forward = forward


def _on_own_stream(place: int, device: torch.device) -> Callable[[], Any]:
    """A context in which this rank of tp draws numbers of its own.

    They start from a number that is drawn outside, equal on all ranks, and the generators go on
    from there afterwards. So the state of the default generators is all the state there is, and
    activation checkpointing, which restores that, draws the same numbers again.
    """

    @contextlib.contextmanager
    def stream() -> Iterator[None]:
        with _disable_current_modes():
            drawn = int(torch.randint(2**62, (), generator=torch.default_generator, device="cpu"))
            generators = default_generators(device)
            states = [generator.get_state() for generator in generators]
            for generator in generators:
                generator.manual_seed((drawn + place * 0x9E3779B97F4A7C15) % 2**63)
        try:
            yield
        finally:
            with _disable_current_modes():
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)

    return stream


def default_generators(device: torch.device) -> list[torch.Generator]:
    """torch's default generators of the CPU and of `device`."""
    generators = [torch.default_generator]
    if device.type == "cuda" and torch.cuda.is_initialized():
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def generator_states(device: torch.device) -> list[bytes]:
    """The states of the default generators of the CPU and of `device`."""
    with _disable_current_modes():
        return [one.get_state().numpy().tobytes() for one in default_generators(device)]


def states_of_generators(device: torch.device) -> tuple[Any, ...]:
    """The same, and those of Python's `random` and of NumPy."""
    return generator_states(device), _states_outside_torch()


class _ByShape(TorchDispatchMode):
    """Decides for each draw, by its shape, whether it is one of a shard."""

    def __init__(self, place: int, device: torch.device) -> None:
        super().__init__()
        self._stream = _on_own_stream(place, device)
        # Of each running module: the shapes of its draws in the plain model, and what else holds.
        self._inside: list[tuple[Iterator[Shape], bool]] = []

    def inside(self, shapes: Sequence[Shape], otherwise: bool) -> Callable[[], Any]:
        """A context in which a module draws these shapes in the plain model."""

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            self._inside.append((iter(shapes), otherwise))
            try:
                with contextlib.nullcontext() if len(self._inside) > 1 else self:
                    yield
            finally:
                self._inside.pop()

        return running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs) or not self._is_of_shard(func, args):
            return func(*args, **kwargs)
        with self._stream():
            return func(*args, **kwargs)

    def _is_of_shard(self, func: Any, args: Sequence[Any]) -> bool:
        shapes, otherwise = self._inside[-1]
        whole = next(shapes, None)
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if isinstance(first, DTensor):
            # On other devices DTensor itself gives each shard its own numbers.
            sharded = any(placement.is_shard() for placement in first.placements)
            return sharded and first.device.type == "cpu"
        shape = _shape_of(func, args)
        if whole is None or len(shape) not in (len(whole), len(whole) - 1):
            return otherwise
        return shape[: len(whole)] != whole[: len(shape)]
