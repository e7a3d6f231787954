"""A batch: named fields, and the batch and sequence dimension of each.

All slicing of fields is here: over the ranks of the cp axis, and into the microbatches of a
pipeline. A model or stage receives the fields that its forward takes by name; the loss receives the
whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.errors import TitanliteError
from titanlite.modules.attention.documents import moved, note, noted, on_host

if TYPE_CHECKING:
    from titanlite.modules.attention import Layout

# The target that torch.nn.functional.cross_entropy ignores by default.
IGNORE_INDEX = -100
DOCUMENTS = "documents"


class FieldDims(NamedTuple):
    """The batch dimension and the sequence dimension of a field; None if it has none."""

    batch: int | None
    sequence: int | None


@dataclass(frozen=True)
class Batch:
    """Samples, or one rank's part of them: mostly sequences of T tokens.

    The first field is the model's first argument: "tokens" [B, T], or any tensor [B, ...], such as
    images. "targets", [B, T] or [B], is masked by IGNORE_INDEX. A batch of tokens has "positions"
    in the sequence, [T], or [B, T] if they differ between sequences. Batches from a data set have
    "sample_keys" [B], from which random numbers are drawn (keyed.py), and those of tokens
    "token_numbers" [B, T], the number of each among all tokens of a run (dropout.py).
    """

    fields: Mapping[str, Tensor]
    dims: Mapping[str, FieldDims]
    on_host: Batch | None = None
    """The same batch in the host's memory, if this is its copy on a GPU."""

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def input_name(self) -> str:
        """The name of the field that is the model's first argument."""
        return next(iter(self.fields))

    @property
    def input(self) -> Tensor:
        """The model's first argument."""
        return self.fields[self.input_name]

    @property
    def tokens(self) -> Tensor:
        return self.fields["tokens"]

    @property
    def targets(self) -> Tensor:
        return self.fields["targets"]

    @property
    def positions(self) -> Tensor:
        return self.fields["positions"]

    @property
    def num_sequences(self) -> int:
        return self.input.size(0)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The batch on a device, with floating-point fields in `dtype` if that is given."""
        fields = {
            name: moved(field, device, dtype if field.is_floating_point() else None)
            for name, field in self.fields.items()
        }
        if device.type != "meta" and self.dims.get(DOCUMENTS) == FieldDims(0, 1):
            known = noted(field := self.fields[DOCUMENTS])
            note(fields[DOCUMENTS], on_host(field[None]) if known is None else known.numbers)
        return Batch(fields, self.dims, None if device.type == "cpu" else self)

    def replace(self, **fields: Tensor) -> Batch:
        """The batch with new values for some fields, whose dimensions stay the same."""
        return Batch({**self.fields, **fields}, self.dims)

    def rows(self, start: int, stop: int) -> Batch:
        """Sequences `start` to `stop` - 1."""
        return self._cut("batch", lambda field, dim: field.narrow(dim, start, stop - start))

    def tokens_to(self, stop: int) -> Batch:
        """The first `stop` tokens of every sequence."""
        return self._cut("sequence", lambda field, dim: field.narrow(dim, 0, stop))

    def _cut(self, which: str, part: Callable[[Tensor, int], Tensor]) -> Batch:
        """The batch with `part(field, dim)` of each field that has this dimension."""
        dims = {name: getattr(of_field, which) for name, of_field in self.dims.items()}
        cut = {n: f if dims[n] is None else part(f, dims[n]) for n, f in self.fields.items()}
        return Batch(cut, self.dims)

    def shard(self, layout: Layout, rank: int) -> Batch:
        """The shard of `rank` on the cp axis: its tokens of every sequence."""
        cut = self._cut("sequence", lambda field, dim: layout.shard(field, dim, rank))
        if self.dims.get(DOCUMENTS) == FieldDims(0, 1):
            ranks, whole = range(layout.num_ranks), self.fields[DOCUMENTS]
            numbers = torch.stack([layout.shard(whole, 1, other) for other in ranks])
            note(cut[DOCUMENTS], on_host(numbers))
        return cut

    def leave_out(self, is_out: Tensor) -> Batch:
        """The batch with targets masked where `is_out`, which broadcasts to [B, T], is true.

        Where targets have no sequence dimension, a sample is masked if the first element of its row
        of `is_out` is true.
        """
        dims, shape = self.dims["targets"], [1] * self.targets.ndim
        if dims.sequence is None:
            is_out = is_out[:, :1]
        else:
            shape[dims.sequence] = is_out.size(1)
        shape[dims.batch or 0] = is_out.size(0)
        is_out = is_out.to(self.targets.device).view(shape)
        return self.replace(targets=self.targets.masked_fill(is_out, IGNORE_INDEX))

    def count_targets(self) -> Tensor:
        """The number of targets that are not masked, an int64 scalar."""
        return (self.targets != IGNORE_INDEX).sum()


def make_batch(
    tokens: Tensor,
    targets: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    more: Mapping[str, tuple[Tensor, FieldDims]] | None = None,
) -> Batch:
    """A batch of `tokens` [B, T]; by default targets are the next tokens, positions 0 to T - 1.

    `targets` is [B, T], `positions` [T] or [B, T]. `more` are other fields and their dimensions.
    """
    if targets is None:
        targets = make_targets(tokens)
    if positions is None:
        positions = torch.arange(tokens.size(1), device=tokens.device)
    fields = {"tokens": tokens, "targets": targets, "positions": positions}
    dims = {
        "tokens": FieldDims(0, 1),
        "targets": FieldDims(0, 1),
        "positions": FieldDims(None, 0) if positions.ndim == 1 else FieldDims(0, 1),
    }
    for name, (field, of_field) in (more or {}).items():
        fields[name], dims[name] = field, of_field
    return Batch(fields, dims)


def make_targets(tokens: Tensor) -> Tensor:
    """The next token of each position: tokens [B, T] -> targets [B, T], int64.

    The last position has no next token and gets IGNORE_INDEX. So a row has T - 1 targets, and
    losses in bits per dimension are means over those.
    """
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches; fields without a batch dimension are taken from the first."""
    first = batches[0]
    fields = {
        name: field
        if (dim := first.dims[name].batch) is None
        else torch.cat([batch[name] for batch in batches], dim)
        for name, field in first.fields.items()
    }
    return Batch(fields, first.dims)


Inputs = Mapping[str, str] | Callable[[Batch], Mapping[str, Any]] | None
"""The arguments of a model's forward besides the first: argument -> field, or a function."""

INPUTS = "titanlite_inputs"
PASSES_ON = "titanlite_passes_on"
"""The attribute of a pipeline stage that is not the last: it may return a tuple of tensors."""


def set_call(
    model: nn.Module, inputs: Inputs = None, output: Callable[[Any], Any] | None = None
) -> None:
    """Set how a model, and every stage that is split off it, is called and what it returns.

    `inputs` gives the arguments of its forward besides the first; by default an argument gets the
    field of its name. `output` is applied to a result that is not a tensor, except to a tuple that
    a pipeline stage passes to the next one.
    """
    if inputs is not None:
        setattr(model, INPUTS, inputs)
    if output is not None:

        def only_output(module: nn.Module, _inputs: Any, result: Any) -> Any:
            passes_on = hasattr(module, PASSES_ON) and isinstance(result, tuple)
            if isinstance(result, Tensor) or passes_on:
                return result
            try:
                return output(result)
            except Exception as error:  # a user's function may raise anything
                raise TitanliteError(
                    f"`output` fails on the {type(result).__name__} that forward of "
                    f"{type(module).__name__} returns, with {type(error).__name__}: {error}; "
                    "correct it where the model is registered"
                ) from error

        model.register_forward_hook(only_output)


def has_own_inputs(module: nn.Module) -> bool:
    """Whether set_call has given the arguments of the module's forward."""
    return hasattr(module, INPUTS)


def asked_for(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The keyword arguments that the module's forward takes after its first argument."""
    inputs: Inputs = getattr(module, INPUTS, None)
    if inputs is None:
        others = [name for name in batch.fields if name != batch.input_name]
        return {name: batch[name] for name in _names_taken(module, others)}
    if callable(inputs):
        arguments = dict(inputs(batch))
    else:
        arguments = {argument: batch[field] for argument, field in inputs.items()}
    return {name: arguments[name] for name in _names_taken(module, arguments)}


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward takes a field with that name."""
    inputs: Inputs = getattr(module, INPUTS, None)
    if isinstance(inputs, Mapping):
        return name in inputs.values()
    return callable(inputs) or name in _names_taken(module, (name,))


def _names_taken(module: nn.Module, names: Collection[str]) -> list[str]:
    parameters = list(inspect.signature(module.forward).parameters.values())
    taken = {parameter.name for parameter in parameters[1:]}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken |= set(names) - {"targets", "token_numbers", "sample_keys", parameters[0].name}
    return [name for name in names if name in taken]


def check_forward(module: nn.Module, fields: Collection[str]) -> None:
    """Raises TitanliteError if the module's forward needs an argument that no batch has.

    `fields` are the names of a batch's fields except its tokens.
    """
    if has_own_inputs(module):
        _check_inputs(module, fields)
        return
    _, *others = inspect.signature(module.forward).parameters.values()
    for parameter in others:
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_needed = parameter.default is parameter.empty and not is_variadic
        if is_needed and parameter.name not in fields:
            raise TitanliteError(
                f"forward of {type(module).__name__} needs `{parameter.name}`, but besides tokens "
                f"a batch has only {' and '.join(f'`{name}`' for name in fields)}; rename or "
                "remove the argument"
            )


def _check_inputs(module: nn.Module, fields: Collection[str]) -> None:
    """Raises TitanliteError if a dict of inputs names an argument or a field that does not exist.

    A pipeline stage may take fewer arguments than the whole model, so this is checked only here.
    """
    inputs: Inputs = getattr(module, INPUTS)
    if not isinstance(inputs, Mapping):
        return
    for argument, field in inputs.items():
        if not _names_taken(module, (argument,)):
            wrong = f"`{argument}`, which forward of {type(module).__name__} does not take"
        elif field not in fields:
            wrong = f"the field `{field}`, but besides its input a batch has {', '.join(fields)}"
        else:
            continue
        raise TitanliteError(f"`inputs` names {wrong}; correct it")


def call_model(
    module: nn.Module, batch: Batch, x: Tensor | tuple[Tensor, ...] | None = None
) -> Any:
    """The output of a model for a batch, or of a stage for `x`, the previous stage's output.

    The tensors of a tuple are the stage's first arguments.
    """
    first = x if isinstance(x, tuple) else (batch.input if x is None else x,)
    return module(*first, **asked_for(module, batch))
