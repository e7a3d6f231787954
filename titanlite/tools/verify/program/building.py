"""On a rank: calls the caller's functions, and finds modules, optimizer and parameters."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, AdamW, Optimizer
from torch.utils._pytree import tree_map

from titanlite.errors import ConfigError
from titanlite.modules.names import unwrapped_name
from titanlite.ranks.turns import is_rank
from titanlite.tools.verify.program.request import Request

DEFAULT_LR = 1e-3


@dataclass
class Built:
    """What the function `reference` or `parallel` has returned, and what was found in it."""

    value: Any
    modules: list[nn.Module]
    optimizer: Any
    request: Request
    is_reference: bool

    def __post_init__(self) -> None:
        self.roots = self.modules

    def unwrap(self, known: Collection[str]) -> None:
        """Instead of modules whose parameters have unknown names take what they wrap: a module with
        all these parameters, under known ones.
        """
        if self.request.rename is None:
            self.modules = [self._inner(root, known) for root in self.roots]

    def _inner(self, root: nn.Module, known: Collection[str]) -> nn.Module:
        number = len(list(root.parameters()))
        for module in root.modules():
            names = {self.name_of(module, name) for name, _ in module.named_parameters()}
            if len(names) == number and names <= {*known}:
                return module
        return root

    @property
    def model(self) -> nn.Module:
        """The only module that was returned."""
        return self.value if isinstance(self.value, nn.Module) else self.roots[0]

    @property
    def rate(self) -> float:
        """The learning rate of the optimizer's first group."""
        groups = getattr(self.optimizer, "param_groups", ())
        return float(next((group.get("lr", 0.0) for group in groups), 0.0))

    def name_of(self, module: nn.Module, name: str) -> str:
        """The reference's name of a module, parameter or buffer of `module`."""
        own = unwrapped_name(module, name)
        return own if self.is_reference else self.request.name_of(own)

    @contextlib.contextmanager
    def parameters(self, *, writes: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters by the reference's names; those of FSDP1 are whole inside."""
        with contextlib.ExitStack() as exits:
            for module in self.modules:
                if self.is_flat:
                    # FSDP1 keeps flat shards: only whole parameters have shapes to compare.
                    summoned = FullyShardedDataParallel.summon_full_params(
                        module, with_grads=not writes, writeback=writes
                    )
                    exits.enter_context(summoned)
            found: dict[str, nn.Parameter] = {}
            for module in self.modules:
                for name, parameter in module.named_parameters():
                    known = self.name_of(module, name)
                    if known in found and found[known] is not parameter:
                        raise ConfigError(
                            f"rename: two parameters of one rank become {known}, one of them "
                            f"{name}; give them different names"
                        )
                    found[known] = parameter
            yield found

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters as they are, by their own names."""
        return {n: p for module in self.modules for n, p in module.named_parameters()}

    @property
    def is_compiled(self) -> bool:
        every = (inner for module in self.modules for inner in module.modules())
        return any(
            inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod") for inner in every
        )

    @property
    def is_flat(self) -> bool:
        """Whether FSDP1 has flattened parameters."""
        every = (inner for module in self.modules for inner in module.modules())
        return any(isinstance(module, FullyShardedDataParallel) for module in every)

    def run_step(self, batch: Any) -> float | None:
        """Forward and backward pass of one batch; returns the loss, None if there is none here."""
        request = self.request
        step = request.reference_step if self.is_reference else request.step
        if step is not None:
            with self._seeing_steps() as stepped:
                loss = step(self.value, batch)
            self._leave_out(stepped)
            return number_of(loss, "step")
        own = None if self.is_reference else request.parallel_loss
        loss = (own or request.loss)(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise ConfigError(
                f"loss: returned a {type(loss).__name__}{shape}; return a tensor with one number"
            )
        loss.backward()
        return number_of(loss, "loss")

    @contextlib.contextmanager
    def _seeing_steps(self) -> Iterator[list[Any]]:
        """Inside, the optimizers that make a step are noted."""
        stepped: list[Any] = []
        hooks = []
        for one in _each(self.optimizer):
            # Not all that are optimizers take hooks.
            with contextlib.suppress(AttributeError):
                hooks.append(one.register_step_pre_hook(lambda own, *_: stepped.append(own)))
        try:
            yield stepped
        finally:
            for hook in hooks:
                hook.remove()

    def _leave_out(self, stepped: Collection[Any]) -> None:
        """Leave these to the caller's `step`; raises ConfigError if no optimizer is left."""
        if stepped:
            left = [one for one in _each(self.optimizer) if one not in stepped]
            if not left:
                raise ConfigError(
                    "step: calls the optimizer's step(), which compare calls after it; leave that "
                    "out, with what follows it (zero_grad), and give clipping as clip="
                )
            self.optimizer = _as_one(left)

    def forget_gradients(self) -> None:
        """Of all parameters, those that the optimizer does not have too."""
        self.optimizer.zero_grad(set_to_none=True)
        for module in self.modules:
            module.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Call the caller's `clip` with the model; returns the gradient norm, 0 without one.

        It gets all that was returned where `parallel` returns several modules with parameters, or
        the reference has a step of its own.
        """
        request = self.request
        if request.clip is None:
            return 0.0
        # A loss may be a module, too.
        models = [root for root in self.roots if next(root.parameters(), None) is not None]
        is_model = len(models) == 1 and request.reference_step is None
        return number_of(request.clip(models[0] if is_model else self.value), "clip") or 0.0


def number_of(value: Any, name: str) -> float | None:
    """A loss or a norm as a number; a DTensor is reduced first."""
    if value is None:
        return None
    if isinstance(value, DTensor):
        value = value.full_tensor()
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name}: returned a {type(value).__name__}; return one number, or None"
        ) from None


def build(request: Request, mesh: Any, *, is_reference: bool) -> Built:
    """Call `reference` or `parallel`, under the comparison's dtype and seed."""
    name = "reference" if is_reference else "parallel"
    function = request.reference if is_reference else request.parallel
    if request.seed is not None:
        torch.manual_seed(request.seed)
    takes_mesh = _needs_arguments(function) or any(p.name == "mesh" for p in _positional(function))
    arguments = [mesh] if not is_reference and takes_mesh else []
    try:
        value = function(*arguments)
    except ValueError as error:
        if "default process group twice" in str(error):
            why = "calls init_process_group, but the ranks have a group already; leave it out"
            raise ConfigError(f"{name}: {why}") from None
        raise
    if is_reference and request.reference_step is None and not isinstance(value, nn.Module):
        raise ConfigError(f"reference: returned a {type(value).__name__}; return an nn.Module")
    modules, optimizers = _find(value)
    if not modules:
        raise ConfigError(
            f"parallel: returned a {type(value).__name__} without an nn.Module; return the "
            "module, or a tuple of it and what `step` needs"
        )
    if not is_reference and request.step is None and len(modules) > 1:
        raise ConfigError(
            f"step: is needed, since `parallel` returned {len(modules)} modules; "
            "give a function (returned value, batch) -> loss that runs forward and backward"
        )
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"{name}: has no parameter that requires a gradient")
    _check_dtype(name, modules, request.dtype)
    optimizer = _as_one(optimizers) if optimizers else make_optimizer(request, parameters)
    return Built(value, modules, optimizer, request, is_reference)


def make_optimizer(request: Request, parameters: list[nn.Parameter]) -> Any:
    """The optimizer of either side, if `parallel` returns none."""
    if request.optimizer is not None:
        made = request.optimizer(parameters)
        several = [*made] if isinstance(made, list | tuple) else [made]
        others = [one for one in several if not callable(getattr(one, "step", None))]
        if others or not several:
            kind = type([*others, made][0]).__name__
            raise ConfigError(f"optimizer: returned a {kind}; return an optimizer, or several")
        return _as_one(several)
    # Parameters may be a mixture of DTensors and plain tensors, which foreach does not take.
    return AdamW(parameters, lr=DEFAULT_LR, foreach=False)


class Optimizers:
    """Several optimizers, as one."""

    def __init__(self, several: Sequence[Any]) -> None:
        self.several = several

    def step(self) -> None:
        """Make a step of each."""
        for one in self.several:
            one.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clear the gradients of each."""
        for one in self.several:
            one.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for one in self.several for group in getattr(one, "param_groups", ())]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state of all."""
        return ChainMap(*(one.state for one in self.several if hasattr(one, "state")))


def _as_one(several: Sequence[Any]) -> Any:
    for one in several:
        if isinstance(one, LBFGS):
            raise ConfigError("optimizer: LBFGS needs a closure for its step; take another")
    return several[0] if len(several) == 1 else Optimizers(several)


def _each(optimizer: Any) -> Sequence[Any]:
    return optimizer.several if isinstance(optimizer, Optimizers) else [optimizer]


@contextlib.contextmanager
def in_dtype(dtype: str) -> Iterator[None]:
    """Inside, torch's default dtype is `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def clean_up() -> None:
    """Free the models of a run; those of ranks that are threads are freed as these end."""
    if not is_rank():
        gc.collect()


def cast(batch: Any, dtype: str) -> Any:
    """The batch with its floating-point tensors in `dtype`."""
    wanted = getattr(torch, dtype)
    return tree_map(
        lambda leaf: (
            leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        batch,
    )


def _needs_arguments(function: Any) -> bool:
    return any(p.default is p.empty for p in _positional(function))


def _positional(function: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters if p.kind in places]


def _find(value: Any) -> tuple[list[nn.Module], list[Any]]:
    """The modules and optimizers in a returned value, without those inside others.

    Dicts and other objects may have optimizers, and modules if there is none elsewhere.
    """
    items: list[Any] = []

    def unfold(item: Any) -> None:
        if isinstance(item, Sequence) and not isinstance(item, str):
            for each in item:
                unfold(each)
        else:
            items.append(item)

    unfold(value)
    has_modules = any(isinstance(item, nn.Module) for item in items)
    others = [item for item in items if not isinstance(item, nn.Module | Optimizer)]
    for item in others:
        if has_modules and _is_optimizer(item):
            continue
        items = [each for each in items if each is not item]
        parts = [*(item if isinstance(item, Mapping) else _own(item)).values()]
        unfold([part for part in parts if not has_modules or _is_optimizer(part)])
    found = [item for item in items if isinstance(item, nn.Module)]
    inside = {id(inner) for module in found for inner in list(module.modules())[1:]}
    modules = {id(module): module for module in found if id(module) not in inside}
    optimizers = {id(item): item for item in items if _is_optimizer(item)}
    inner = {id(part) for one in optimizers.values() for part in _own(one).values()}
    return list(modules.values()), [one for key, one in optimizers.items() if key not in inner]


def _own(item: Any) -> dict[str, Any]:
    return getattr(item, "__dict__", {})


def _is_optimizer(item: Any) -> bool:
    """Whether it is an optimizer, or wraps one as ZeRO by hand does.

    A trainer's step takes a batch, and schedules and pipelines have no zero_grad.
    """
    if isinstance(item, Optimizer | nn.Module | type):
        return isinstance(item, Optimizer)
    is_one = all(callable(getattr(item, name, None)) for name in ("step", "zero_grad"))
    return is_one and not _needs_arguments(item.step)


def _check_dtype(name: str, modules: Sequence[nn.Module], dtype: str) -> None:
    wanted = getattr(torch, dtype)
    for module in modules:
        for parameter, value in module.named_parameters():
            if value.is_floating_point() and value.dtype != wanted:
                own = str(value.dtype).removeprefix("torch.")
                known = unwrapped_name(module, parameter)
                raise ConfigError(
                    f"{name}: {known} is {own}, but the comparison runs in {dtype}, torch's "
                    "default dtype there; build it without naming a dtype, or give "
                    'dtype="float32"'
                )
