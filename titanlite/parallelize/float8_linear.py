"""A linear layer whose products have their operands in float8.

    amax -> scale -> cast -> product, for each operand of the three products of a layer

An amax is the largest magnitude of all that a scale is for, on whatever ranks that is: the tokens
of a microbatch over every axis that cuts them, features over tp. So the numbers are those of one
process under every plan. A product is torch._scaled_mm's, or emulated: the operands are multiplied
as the values that they stand for, in the layer's own dtype, at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanlite.errors import TitanliteError
from titanlite.parallelize.torchao import Recipe

# torchao's, against a division by zero.
LEAST_AMAX = 1e-12
# The bits of a float32's sign and exponent: a power of two has no others.
EXPONENT = -0x00800000
# What torch._scaled_mm needs both dimensions of an operand to be multiples of.
MULTIPLE = 16

Groups = tuple[str, ...]
"""Names of process groups, one after the other: a maximum over each is one over all."""


@dataclass(frozen=True)
class AmaxGroups:
    """The process groups whose ranks hold the other parts of what an amax is of.

    `tokens`: those whose ranks hold other tokens of a microbatch. `features`: tensor parallelism's,
    over which a layer's input features are cut ("in"), its output features ("out"), or neither.
    """

    tokens: Groups = ()
    features: Groups = ()


@dataclass(frozen=True)
class Scaling:
    """The recipe and the groups of a layer that is cut in one way: all that its products need."""

    recipe: Recipe
    groups: AmaxGroups
    cut: str
    """The features that tp cuts: "in", "out", or "" where each rank has the whole layer."""
    hardware: bool
    """Whether products are torch._scaled_mm's."""

    def over_tokens(self) -> Groups:
        """Of an amax over tokens, for each feature."""
        # Of a layer that is not cut the ranks of tp may hold other tokens.
        return self.groups.tokens if self.cut else self.groups.tokens + self.groups.features

    def over_features(self, which: str) -> Groups:
        """Of an amax over the layer's input or output features ("in", "out")."""
        return self.groups.features if self.cut == which else ()

    def over_all(self, which: str) -> Groups:
        """Of an amax over the tokens and features of the input ("in") or output ("out")."""
        return self.over_tokens() + self.over_features(which)

    def over_weight(self) -> Groups:
        """Of an amax over a whole weight."""
        return self.groups.features if self.cut else ()


class Cast(NamedTuple):
    """A matrix in float8, and its scale: one, or one a row ([rows, 1])."""

    data: Tensor
    scale: Tensor

    def t(self) -> Cast:
        """The transposed matrix, of one scale."""
        return Cast(self.data.t(), self.scale)


class Float8Weight(torch.Tensor):
    """A weight that was gathered in float8: its float8 values and its one scale.

    To autograd it is a tensor of the dtype that its gradient has. There are no other values, so
    that any operator but a Float8Linear's raises.
    """

    data8: Tensor
    scale: Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Weight:
        weight = torch.Tensor._make_wrapper_subclass(
            cls, data8.size(), strides=data8.stride(), dtype=dtype, device=data8.device
        )
        weight.data8, weight.scale = data8, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Weight({tuple(self.shape)}, {self.data8.dtype} for {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, outer_size: Any, outer_stride: Any
    ) -> Float8Weight:
        return Float8Weight(inner["data8"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0]
        if func in _SAME_SHAPE and isinstance(own, Float8Weight):
            if func in _VIEWS and tuple(args[1]) != tuple(own.shape):
                raise TitanliteError(f"a weight gathered in float8 stays of one shape, not {args}")
            return Float8Weight(own.data8.detach(), own.scale, own.dtype)
        raise TitanliteError(
            f"{func} was called with a weight that was gathered in float8, which only its layer's "
            "own product multiplies; let what computes in its place call `product`"
        )


_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.as_strided.default, _aten._unsafe_view.default)
_SAME_SHAPE = (*_VIEWS, _aten.detach.default, _aten.alias.default)


class Float8Linear(nn.Linear):
    """nn.Linear with products in float8; parameters are those of `layer`, in its precision.

    `product(x, weight)` is what a style that cuts the layer calls with a shard of the weight, and
    `products` the same for several layers with one input.
    """

    def __init__(
        self, layer: nn.Linear, recipe: Recipe, groups: AmaxGroups, *, emulate: bool = False
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.recipe, self.groups, self.emulate = recipe, groups, emulate
        self.was_multiplied = False
        self.observed: list[tuple[bool, float]] | None = None
        """Where it is a list, joined by what each product scales its input by: whether by rows, and
        the largest amax."""
        self.precomputed: tuple[Tensor, tuple[int, int]] | None = None
        """Of a weight that is gathered in float8: its amax, and at which version of the weight."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe.name}"

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return self._forward_of_shards(x, self.weight)
        output = self.product(x, self.weight)
        return output if self.bias is None else output + self.bias

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x` [..., K] times the weight, or a shard of it, [N, K] -> [..., N]; no bias."""
        return self.products([self], x, [weight])[0]

    @staticmethod
    def products(
        layers: Sequence[Float8Linear], x: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The products of layers that have one input and are cut alike; its cast is shared."""
        scaling = layers[0].scaling_of(x, weights[0])
        if not torch.compiler.is_compiling():
            for layer in layers:
                layer.was_multiplied = True
                if layer.observed is not None:
                    rows = x.detach().reshape(-1, x.size(-1))
                    (amax,) = reduce_max([_of_input(scaling, rows)])
                    layer.observed.append((scaling.recipe.rowwise, amax.max().item()))
        return _Products.apply(scaling, x, *weights)

    def scaling_of(self, x: Tensor, weight: Tensor) -> Scaling:
        """How the product of this layer's weight, or of a shard of it, is scaled."""
        cut = "out" if weight.size(0) < self.out_features else ""
        cut = "in" if weight.size(1) < self.in_features else cut
        hardware = not self.emulate and has_hardware(x.device, x.dtype, self.recipe.name)
        return Scaling(self.recipe, self.groups, cut, hardware)

    def _forward_of_shards(self, x: Tensor, weight: DTensor) -> Tensor:
        """The forward pass where PyTorch's own styles have made weight and input DTensors."""
        mesh, (placement,) = weight.device_mesh, weight.placements
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        features = Shard(x.ndim - 1)
        x_gradient: Placement
        weight_gradient: Placement = placement
        output: Placement
        if placement == Shard(0):
            x, x_gradient, output = x.redistribute(mesh, [Replicate()]), Partial(), features
        elif placement == Shard(1):
            x, x_gradient, output = x.redistribute(mesh, [features]), features, Partial()
        else:
            if x.placements[0] in (features, Partial()):
                x = x.redistribute(mesh, [Replicate()])
            x_gradient = output = x.placements[0]
            weight_gradient = Replicate() if output == Replicate() else Partial()
        product = self.product(
            x.to_local(grad_placements=[x_gradient]),
            weight.to_local(grad_placements=[weight_gradient]),
        )
        shape = torch.Size((*x.shape[:-1], self.out_features))
        whole = DTensor.from_local(
            product,
            mesh,
            [output],
            run_check=False,
            shape=shape,
            stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
        )
        return whole if self.bias is None else whole + self.bias


def has_hardware(device: torch.device | str, dtype: torch.dtype, recipe: str) -> bool:
    """Whether torch._scaled_mm multiplies such operands on this device's own float8 units.

    Its rowwise products come in bfloat16 alone.
    """
    dtypes = (torch.bfloat16, torch.float32) if recipe == "tensorwise" else (torch.bfloat16,)
    if torch.device(device).type != "cuda" or dtype not in dtypes:
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


class _Products(torch.autograd.Function):
    """x @ W.T for each of several weights W; its gradients are float8 products as well.

    What is saved is the input, in float8 where one cast serves both products that it is in, and
    each weight as it is, which FSDP2 frees and gathers again: it is cast once more.
    """

    @staticmethod
    def forward(ctx: Any, scaling: Scaling, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        recipe = scaling.recipe
        rows = x.reshape(-1, x.size(-1))
        dim = 1 if recipe.rowwise else None
        own = [w for w in weights if not isinstance(w, Float8Weight)]
        over_weight = scaling.over_features("in") if recipe.rowwise else scaling.over_weight()
        amax, *amaxes = reduce_max(
            [_of_input(scaling, rows), *((amax_of(w, dim), over_weight) for w in own)]
        )
        x_cast = cast(rows, scale_of(amax, recipe.dtype, recipe), recipe.dtype)
        scales = iter([scale_of(a, recipe.dtype, recipe) for a in amaxes])
        weight_scales = [w.scale if isinstance(w, Float8Weight) else next(scales) for w in weights]
        casts = [
            _cast_weight(w, scale, recipe) for w, scale in zip(weights, weight_scales, strict=True)
        ]
        sizes = [w.size(0) for w in weights]
        outputs = _multiply_joined(casts, sizes, x_cast, x.dtype, scaling, is_forward=True)
        if recipe.rowwise:
            ctx.save_for_backward(rows, *weights)
        else:
            ctx.save_for_backward(*x_cast, *weights, *weight_scales)
        ctx.scaling, ctx.num_weights, ctx.shape, ctx.dtype = (
            scaling,
            len(weights),
            x.shape,
            x.dtype,
        )
        shapes = [(*x.shape[:-1], size) for size in sizes]
        if len(outputs) == 1:
            # No view, of which FSDP2 would warn.
            return (torch.ops.aten._unsafe_view(outputs[0], shapes[0]),)
        return tuple(out.reshape(shape) for out, shape in zip(outputs, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaling, count, dtype = ctx.scaling, ctx.num_weights, ctx.dtype
        gs = [g.reshape(-1, g.size(-1)) for g in gradients]
        gradient_of_rows = _rowwise_gradients if scaling.recipe.rowwise else _tensorwise_gradients
        x_gradient, weight_gradients = gradient_of_rows(
            scaling, gs, ctx.saved_tensors, count, dtype, ctx.needs_input_grad[1:]
        )
        if x_gradient is not None:
            x_gradient = x_gradient.reshape(ctx.shape)
        return None, x_gradient, *weight_gradients


Gradients = tuple[Tensor | None, Sequence[Tensor | None]]


def _tensorwise_gradients(
    scaling: Scaling,
    gs: Sequence[Tensor],
    saved: Sequence[Tensor],
    count: int,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> Gradients:
    recipe = scaling.recipe
    x = Cast(saved[0], saved[1])
    weights, scales = saved[2 : 2 + count], saved[2 + count :]
    over = scaling.over_all("out")
    amaxes = reduce_max([(amax_of(g, None), over) for g in gs])
    g_casts = [
        cast(g, scale_of(amax, recipe.gradient_dtype, recipe), recipe.gradient_dtype)
        for g, amax in zip(gs, amaxes, strict=True)
    ]
    x_gradient = None
    if needed[0]:
        casts = [
            _cast_weight(w, scale, recipe).t() for w, scale in zip(weights, scales, strict=True)
        ]
        x_gradient = _sum_of_products(g_casts, casts, dtype, scaling)
    weight_gradients: Sequence[Tensor | None] = [None] * count
    if any(needed[1:]):
        sizes = [g.size(1) for g in gs]
        flipped = [g.t() for g in g_casts]
        weight_gradients = _multiply_joined(flipped, sizes, x.t(), weights[0].dtype, scaling)
    return x_gradient, weight_gradients


def _rowwise_gradients(
    scaling: Scaling,
    gs: Sequence[Tensor],
    saved: Sequence[Tensor],
    count: int,
    dtype: torch.dtype,
    needed: Sequence[bool],
) -> Gradients:
    recipe = scaling.recipe
    x, *weights = saved
    over_features, over_tokens = scaling.over_features("out"), scaling.over_tokens()
    # Of the output gradients by tokens and of the weights by input features, for the input's
    # gradient; of the output gradients and the input by features, for the weights'.
    weight_dim = 0 if recipe.rowwise_weight_for_input else None
    over_weight = over_features if recipe.rowwise_weight_for_input else scaling.over_weight()
    wanted: list[tuple[Tensor, Groups]] = []
    if needed[0]:
        wanted += [(amax_of(g, 1), over_features) for g in gs]
        wanted += [(amax_of(w, weight_dim), over_weight) for w in weights]
    casts_for_weight = recipe.casts_for_weight and any(needed[1:])
    if casts_for_weight:
        wanted += [(amax_of(one, 0), over_tokens) for one in (*gs, x)]
    amaxes = reduce_max(wanted)
    g_dtype = recipe.gradient_dtype
    x_gradient = None
    if needed[0]:
        g_scales = [scale_of(amax, g_dtype, recipe) for amax in amaxes[:count]]
        w_scales = [scale_of(a, recipe.dtype, recipe) for a in amaxes[count : 2 * count]]
        g_casts = [cast(g, scale, g_dtype) for g, scale in zip(gs, g_scales, strict=True)]
        w_casts = [
            cast(w.t(), scale.t() if scale.ndim else scale, recipe.dtype)
            for w, scale in zip(weights, w_scales, strict=True)
        ]
        x_gradient = _sum_of_products(g_casts, w_casts, dtype, scaling)
        amaxes = amaxes[2 * count :]
    weight_gradients: Sequence[Tensor | None] = [None] * count
    if casts_for_weight:
        scales = [scale_of(amax, g_dtype, recipe).t() for amax in amaxes[:count]]
        flipped = [cast(g.t(), scale, g_dtype) for g, scale in zip(gs, scales, strict=True)]
        x_scale = scale_of(amaxes[count], recipe.dtype, recipe).t()
        x_cast = cast(x.t(), x_scale, recipe.dtype)
        sizes = [g.size(1) for g in gs]
        weight_gradients = _multiply_joined(flipped, sizes, x_cast, weights[0].dtype, scaling)
    elif any(needed[1:]):
        joined = torch.cat(list(gs), dim=1).t() @ x
        weight_gradients = joined.to(weights[0].dtype).split([g.size(1) for g in gs])
    return x_gradient, weight_gradients


def _of_input(scaling: Scaling, rows: Tensor) -> tuple[Tensor, Groups]:
    """The amax of the input in the forward product, as this rank has it, and over which groups."""
    if scaling.recipe.rowwise:
        return amax_of(rows, 1), scaling.over_features("in")
    return amax_of(rows, None), scaling.over_all("in")


def amax_of(x: Tensor, dim: int | None) -> Tensor:
    """The largest magnitude of this rank's part of a matrix, or of each row or column of it."""
    magnitudes = x.abs()
    if dim is None:
        # What selective activation checkpointing saves (SAVED_OPERATORS).
        return magnitudes.max() if x.numel() else magnitudes.new_zeros(())
    return magnitudes.amax(dim, keepdim=True)


def reduce_max(amaxes: Sequence[tuple[Tensor, Groups]]) -> list[Tensor]:
    """Each tensor's maximum over the ranks of its groups; one collective for those of one group."""
    reduced = [amax for amax, _ in amaxes]
    for groups in dict.fromkeys(groups for _, groups in amaxes if groups):
        places = [i for i, (_, of_amax) in enumerate(amaxes) if of_amax == groups]
        flat = torch.cat([reduced[i].reshape(-1) for i in places])
        for group in groups:
            flat = torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(flat, "max", group)
            )
        parts = flat.split([reduced[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            reduced[i] = part.reshape(reduced[i].shape)
    return reduced


def scale_of(amax: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """What takes an amax to the largest value of a float8 dtype, in float32, as torchao has it."""
    # In float64, so that compiled code divides as eager code does.
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()
    if recipe.power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Cast:
    """`x` times its scale in float8; what is too large becomes the largest value."""
    most = torch.finfo(dtype).max
    return Cast((x.float() * scale).clamp(-most, most).to(dtype), scale)


def _cast_weight(weight: Tensor, scale: Tensor, recipe: Recipe) -> Cast:
    if isinstance(weight, Float8Weight):
        return Cast(weight.data8, scale)
    return cast(weight, scale, recipe.dtype)


def _values(operand: Cast, dtype: torch.dtype) -> Tensor:
    """The values that a float8 matrix stands for, in at least float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return operand.data.to(wide) / operand.scale.to(wide)


def _multiply(a: Cast, b: Cast, dtype: torch.dtype, scaling: Scaling, *, fast: bool) -> Tensor:
    """a @ b.T, for `a` [M, K] and `b` [N, K]."""
    if not scaling.hardware:
        return (_values(a, dtype) @ _values(b, dtype).t()).to(dtype)
    from torchao.float8.float8_ops import addmm_float8_unwrapped

    if a.scale.ndim or b.scale.ndim:
        a = Cast(a.data, a.scale.expand(a.data.size(0), 1))
        b = Cast(b.data, b.scale.expand(b.data.size(0), 1))
    a_data, b_data = a.data.contiguous(), b.data.contiguous()
    if missing := -a_data.size(1) % MULTIPLE:
        a_data, b_data = (_with_zeros(data, missing) for data in (a_data, b_data))
    return addmm_float8_unwrapped(
        a_data,
        a.scale.contiguous(),
        b_data.t(),
        b.scale.t().contiguous() if b.scale.ndim else b.scale,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


def _with_zeros(data: Tensor, count: int) -> Tensor:
    """A float8 matrix with so many more columns of zeros."""
    return nn.functional.pad(data.view(torch.uint8), (0, count)).view(data.dtype)


def _multiply_joined(
    parts: Sequence[Cast],
    sizes: Sequence[int],
    x: Cast,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    is_forward: bool = False,
) -> list[Tensor]:
    """x @ part.T of each of several matrices in the forward pass, else part @ x.T.

    One product where it can hold a scale for each: where scales are of rows, or it is emulated.
    """
    fast = is_forward and scaling.recipe.fast_accumulation

    def multiply(part: Cast) -> Tensor:
        a, b = (x, part) if is_forward else (part, x)
        return _multiply(a, b, dtype, scaling, fast=fast)

    if len(parts) == 1 or (scaling.hardware and not scaling.recipe.rowwise):
        return [multiply(part) for part in parts]
    data = torch.cat([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    scales = [part.scale.expand(part.data.size(0), 1) for part in parts]
    joined = multiply(Cast(data, torch.cat(scales)))
    return list(joined.split(list(sizes), dim=1 if is_forward else 0))


def _sum_of_products(
    a: Sequence[Cast], b: Sequence[Cast], dtype: torch.dtype, scaling: Scaling
) -> Tensor:
    """The sum of a @ b.T over pairs; one product where it is emulated."""
    if scaling.hardware or len(a) == 1:
        first, *others = [
            _multiply(one, other, dtype, scaling, fast=False)
            for one, other in zip(a, b, strict=True)
        ]
        return sum(others, first)
    left = torch.cat([_values(one, dtype) for one in a], dim=1)
    right = torch.cat([_values(one, dtype) for one in b], dim=1)
    return (left @ right.t()).to(dtype)
