"""On a rank: what is compared, be it a job or other code.

A Subject has the parameters of this rank and says which parts of whole tensors they are. It records
a reference, and compares a rank with that record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titanlite.modules.names import unwrapped_name
from titanlite.modules.shards import local_part, shard_of, whole_tensor
from titanlite.tools.verify.agreement import MISSING, agreement, dense, digest_of
from titanlite.tools.verify.differences import NOISE
from titanlite.tools.verify.events import Events, recorded
from titanlite.tools.verify.record import Agreement

Cut = Callable[[Tensor], Tensor]


@dataclass
class LocalPart:
    """A parameter of this rank, and the part of the reference's tensor that it should equal."""

    shape: torch.Size
    """Of the reference's tensor."""
    parameter: nn.Parameter
    cut: Cut = lambda whole: whole
    """A slice of the reference's tensor; a DTensor's own placements cut further."""

    def part_of(self, whole: Tensor, like: Tensor | None = None) -> Tensor:
        """This rank's part of `whole`; `like` is a DTensor with other placements."""
        like = like if isinstance(like, DTensor) else self.parameter
        return same_part(self.cut(whole), like)

    def part_of_state(self, whole: Tensor, own: Tensor) -> Tensor:
        """The part of an entry of the optimizer's state that `own` should equal.

        An entry may be shaped as the parameter or, as Adafactor's means are, as some of its
        dimensions, which are cut as the parameter's are. Where it may be one of several dimensions,
        it is the one that `own` is nearest to; so it is if `own` is one of equal chunks, since an
        optimizer may shard its state itself.
        """
        if whole.ndim > 0 and whole.shape == self.shape:
            part, mine = self.part_of(whole), local_part(own)
            cut = [d for d in range(part.ndim) if mine.shape[d : d + 1] != part.shape[d : d + 1]]
            if len(cut) != 1 or mine.ndim != part.ndim or not mine.numel():
                return part
            chunks = part.split(mine.size(cut[0]), cut[0])
            return min(chunks, key=lambda chunk: agreement(_own(own), chunk, whole).error)
        if isinstance(own, DTensor) or whole.ndim != own.ndim:
            return same_part(whole, own)
        here = local_part(self.parameter).shape
        for place, sizes in enumerate(zip(whole.shape, own.shape, strict=True)):
            dims = [d for d, both in enumerate(zip(self.shape, here, strict=True)) if both == sizes]
            if sizes[0] != sizes[1] and dims:
                parts = [whole.index_select(place, self._numbers_kept(dim)) for dim in dims]
                whole = min(parts, key=lambda part: agreement(_own(own), part, part).error)
        return whole

    def _numbers_kept(self, dim: int) -> Tensor:
        """Which numbers of a dimension this rank's part has."""
        numbers = torch.arange(self.shape[dim]).view([-1, *[1] * (len(self.shape) - dim - 1)])
        kept = self.part_of(numbers.expand(self.shape).contiguous())
        return kept.movedim(dim, 0).flatten(1)[:, 0]

    @functools.cached_property
    def place(self) -> str:
        """A digest of the elements that this rank holds: equal for replicas."""
        numbers = torch.arange(self.shape.numel()).view(self.shape)
        part = self.part_of(numbers)
        return f"{list(part.shape)} {digest_of(part)}"


LocalParts = Mapping[str, LocalPart]
"""By the reference's name of the parameter."""


@dataclass
class Subject:
    """The model and the optimizer of a job, or of other code, on this rank."""

    local: LocalParts
    optimizer: Optimizer
    modules: Sequence[nn.Module]
    """The parts of the model that are on this rank."""
    is_whole: Sequence[bool]
    """Whether the output of each of them is that of the model."""
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """The groups of this rank, by axis, without axes whose ranks have modules of their own."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    name_of: Callable[[nn.Module, str], str] = unwrapped_name
    """The reference's name of a name in a module."""
    is_job: bool = True
    """If not, it may have other state and buffers than the reference, and no gradient is zero."""
    _noise: dict[str, Tensor] = field(default_factory=dict)
    """Parameter -> the largest gradient that each element of this rank's part has had, divided by
    what is only rounding error."""

    def recorded(self, kept: Events) -> AbstractContextManager[Events]:
        """Inside, `kept` records all modules. In a job, what a plan's hooks do is the module's."""
        parts, is_whole, name_of = self.modules, self.is_whole, self.name_of
        return recorded(parts, is_whole, name_of, kept, before_hooks=self.is_job)

    def buffers(self) -> dict[str, Tensor]:
        """All buffers of this rank's parts of the model, non-persistent ones too."""
        return {
            self.name_of(module, name): buffer
            for module in self.modules
            for name, buffer in module.named_buffers()
        }

    def state(self) -> dict[str, Tensor]:
        """The tensors of the optimizer's state, by "parameter.key"."""
        return {
            f"{name}.{key}": value
            for name, one in self.local.items()
            for key, value in self.optimizer.state.get(one.parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def options(self) -> dict[str, dict[str, Any]]:
        """What the optimizer's groups say of each parameter, and which state it has of it."""
        names = {id(one.parameter): name for name, one in self.local.items()}
        found: dict[str, dict[str, Any]] = {}
        for group in getattr(self.optimizer, "param_groups", ()):
            own = {k: v for k, v in group.items() if isinstance(v, (bool, int, float, str, tuple))}
            for one in group.get("params", ()):
                if id(one) in names:
                    state = sorted(map(str, self.optimizer.state.get(one, ())))
                    found[names[id(one)]] = {**own, "the state": state}
        return found

    def whole_weights(self) -> dict[str, Tensor]:
        """Copies of the weights of a reference."""
        return _copies((name, one.parameter) for name, one in self.local.items())

    def whole_gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients of a reference."""
        return _copies(
            (name, torch.zeros_like(own) if own.grad is None else own.grad)
            for name, one in self.local.items()
            if (own := one.parameter).grad is not None or (own.requires_grad and not self.is_job)
        )

    def whole_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what a step of a reference leaves: weights, optimizer state and buffers."""
        state, buffers = _copies(self.state().items()), _copies(self.buffers().items())
        return {"weights": self.whole_weights(), "state": state, "buffers": buffers}

    def compare_weights(self, known: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """This rank's parts of the weights compared with the reference's, as in all of these."""
        own = {name: one.parameter for name, one in self.local.items()}
        is_noise = {name: (one > 0) & (one <= 1) for name, one in self._noise.items()}
        return self._compare(own, known, is_noise)

    def compare_gradients(self, known: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """One that only one side has counts as differing."""
        every = {name: one.parameter.grad for name, one in self.local.items()}
        own = {name: gradient for name, gradient in every.items() if gradient is not None}
        if not self.is_job:
            own, known = (
                {n: g for n, g in some.items() if n in others or _own(g).any()}
                for some, others in ((own, known), (known, own))
            )
        self._find_noise(own, known)
        return self._compare(own, known)

    def _find_noise(self, own: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
        """Note how large the gradients of single elements are, beside rounding error."""
        squares = sum(whole.double().square().sum().item() for whole in known.values())
        for name in own.keys() & known.keys() if squares else ():
            a, b = _own(own[name]).cpu(), self.local[name].part_of(known[name], own[name]).cpu()
            if a.shape == b.shape:
                share = torch.maximum(a.abs(), b.abs()).double() / (NOISE * math.sqrt(squares))
                self._noise[name] = torch.maximum(self._noise.get(name, share), share)

    def _compare(
        self,
        own: Mapping[str, Tensor],
        known: Mapping[str, Tensor],
        is_noise: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Agreement]:
        found = {}
        for name, one in self.local.items():
            tensor, whole = own.get(name), known.get(name)
            if tensor is not None and whole is not None:
                part = one.part_of(whole, tensor)
                found[name] = agreement(_own(tensor), part, whole, (is_noise or {}).get(name))
            elif tensor is not None:
                found[name] = MISSING._replace(digest=digest_of(_own(tensor)))
            elif whole is not None:
                found[name] = MISSING
        return found

    def compare_state(self, known: Mapping[str, Tensor]) -> dict[str, Agreement]:
        """Entries that only one side has count as differing in a job."""
        found, own = {}, self.state()
        for entry, tensor in own.items():
            whole, one = known.get(entry), self.local[entry.rpartition(".")[0]]
            if whole is not None:
                part = one.part_of_state(whole, tensor)
                if self.is_job or part.shape == _own(tensor).shape:
                    found[entry] = agreement(_own(tensor), part, whole)
            elif self.is_job:
                found[entry] = MISSING
        names = tuple(f"{name}." for name in self.local) if self.is_job else ()
        missing = [entry for entry in known if entry not in own and entry.startswith(names)]
        return found | dict.fromkeys(missing, MISSING)

    def compare_buffers(
        self, known: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Agreement]:
        """All buffers, or these; those that the reference lacks count as differing in a job."""
        found = {}
        for name, buffer in (self.buffers() if buffers is None else buffers).items():
            whole = known.get(name)
            if whole is not None and (self.is_job or whole.shape == buffer.shape):
                found[name] = agreement(_own(buffer), same_part(whole, buffer), whole)
            elif self.is_job:
                found[name] = MISSING
        return found


def same_part(whole: Tensor, parameter: Tensor) -> Tensor:
    return shard_of(whole, parameter) if whole.shape == parameter.shape else whole


def _own(tensor: Tensor) -> Tensor:
    """A copy of this rank's part. FSDP1 frees storage, which it cannot once numpy has seen it."""
    return dense(local_part(tensor.detach())).clone()


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: dense(whole_tensor(tensor.detach())).cpu().clone() for name, tensor in tensors}
