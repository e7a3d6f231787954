"""Float8Linear: a linear layer that multiplies in float8.

    amax -> scale -> cast -> product, for each operand of the three products of a layer

An amax is the largest magnitude among all values that share a scale. These values may be spread
over ranks: the tokens of a microbatch over every axis that splits them, the features over tp. The
amax is reduced over these ranks, so scales and results equal those of one process under every plan.
A product runs in torch._scaled_mm or is emulated: the operands are converted back from float8 and
multiplied in the layer's dtype, at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanlite.errors import TitanliteError
from titanlite.modules.device_support import support
from titanlite.parallelize.float8.torchao import Recipe

# The same as torchao's; it prevents a division by zero.
LEAST_AMAX = 1e-12
# The sign and exponent bits of a float32; in a power of two, all other bits are zero.
EXPONENT = -0x00800000
# torch._scaled_mm requires both dimensions of an operand to be multiples of this.
MULTIPLE = 16

Groups = tuple[str, ...]
"""Names of process groups. A maximum over each in turn is a maximum over all their ranks."""


@dataclass(frozen=True)
class AmaxGroups:
    """The process groups over which an amax may be reduced.

    `tokens`: groups whose ranks hold different tokens of a microbatch. `features`: the groups of
    tensor parallelism, over which a layer is sharded by its input features ("in"), by its output
    features ("out"), or not at all.
    """

    tokens: Groups = ()
    features: Groups = ()


@dataclass(frozen=True)
class Scaling:
    """The recipe and the process groups that the products of one layer need."""

    recipe: Recipe
    groups: AmaxGroups
    cut: str
    """The features that tp shards: "in", "out", or "" if the layer is replicated."""
    hardware: bool
    """Whether products run in torch._scaled_mm."""
    note: Callable[[int, str, Tensor], None] | None = None
    """Called with the index of a weight, "weight" or "gradient", and its scale."""

    def over_tokens(self) -> Groups:
        """The groups of an amax over tokens, one amax per feature."""
        # If the layer is replicated, the ranks of tp may hold different tokens.
        return self.groups.tokens if self.cut else self.groups.tokens + self.groups.features

    def over_features(self, which: str) -> Groups:
        """The groups of an amax over the layer's input or output features ("in", "out")."""
        return self.groups.features if self.cut == which else ()

    def over_all(self, which: str) -> Groups:
        """The groups of an amax over all tokens and features of the input or output."""
        return self.over_tokens() + self.over_features(which)

    def over_weight(self) -> Groups:
        """The groups of an amax over a whole weight."""
        return self.groups.features if self.cut else ()


class Cast(NamedTuple):
    """A float8 matrix and its scale: a scalar, or one scale per row ([rows, 1])."""

    data: Tensor
    scale: Tensor

    def t(self) -> Cast:
        """The transposed matrix; only for a scalar scale."""
        return Cast(self.data.t(), self.scale)


class Float8Weight(torch.Tensor):
    """A weight that was gathered in float8: its float8 values and their scalar scale.

    Autograd sees a tensor with the dtype of the gradient. It has no values in that dtype, so every
    operator except the product of Float8Linear raises TitanliteError.
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
                raise TitanliteError(f"a weight gathered in float8 cannot be reshaped: {args}")
            return Float8Weight(own.data8.detach(), own.scale, own.dtype)
        raise TitanliteError(
            f"{func} cannot use a weight that was gathered in float8; call the layer's "
            "product(x, weight) instead"
        )


_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.as_strided.default, _aten._unsafe_view.default)
_SAME_SHAPE = (*_VIEWS, _aten.detach.default, _aten.alias.default)


class Float8Linear(nn.Linear):
    """nn.Linear with products in float8. It takes over the parameters of `layer` unchanged.

    A tensor-parallel style calls `product(x, weight)` with a shard of the weight, or `products`
    for several layers that share an input.
    """

    def __init__(
        self, layer: nn.Linear, recipe: Recipe, groups: AmaxGroups, *, emulate: bool = False
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.recipe, self.groups, self.emulate = recipe, groups, emulate
        self.was_multiplied = False
        self.observed: list[tuple[str, bool, float]] | None = None
        """If a list, each product appends ("input", whether it has a scale per row, its largest
        amax), and if each has one scale, ("weight" or "gradient", False, the scale's inverse)."""
        self.precomputed: tuple[Tensor, tuple[int, int]] | None = None
        """For a weight that is gathered in float8: its amax, and the weight's version then."""
        self.while_scaling: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Entered while FSDP2 casts the weight ("cast"), computes its amax in advance ("amax"), or,
        of the first of several layers, their scales ("scales")."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe.name}"

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return self._forward_of_shards(x, self.weight)
        output = self.product(x, self.weight)
        return output if self.bias is None else output + self.bias

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] @ weight.T -> [..., N], without bias; `weight` [N, K] may be a shard."""
        return self.products([self], x, [weight])[0]

    @staticmethod
    def products(
        layers: Sequence[Float8Linear], x: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The products of layers with the same input and the same sharding; `x` is cast once."""
        scaling = layers[0].scaling_of(x, weights[0])
        if not torch.compiler.is_compiling():
            for layer in layers:
                layer.was_multiplied = True
                if layer.observed is not None:
                    rows = x.detach().reshape(-1, x.size(-1))
                    (amax,) = reduce_max([_of_input(scaling, rows)])
                    rowwise = scaling.recipe.rowwise
                    layer.observed.append(("input", rowwise, amax.max().item()))
            if layers[0].observed is not None:

                def note(index: int, what: str, scale: Tensor) -> None:
                    if (observed := layers[index].observed) is not None and scale.numel() == 1:
                        observed.append((what, False, 1.0 / scale.item()))

                scaling = replace(scaling, note=note)
        return _Products.apply(scaling, x, *weights)

    def scaling_of(self, x: Tensor, weight: Tensor) -> Scaling:
        """The scaling of a product with this layer's weight or a shard of it."""
        cut = "out" if weight.size(0) < self.out_features else ""
        cut = "in" if weight.size(1) < self.in_features else cut
        hardware = not self.emulate and has_hardware(x.device, x.dtype, self.recipe.name)
        return Scaling(self.recipe, self.groups, cut, hardware)

    def _forward_of_shards(self, x: Tensor, weight: DTensor) -> Tensor:
        """The forward pass under PyTorch's own styles, where weight and input are DTensors."""
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
        stride = make_contiguous_strides_for(shape)
        whole = DTensor.from_local(
            product, mesh, [output], run_check=False, shape=shape, stride=stride
        )
        return whole if self.bias is None else whole + self.bias


def has_hardware(device: torch.device | str, dtype: torch.dtype, recipe: str) -> bool:
    """Whether torch._scaled_mm supports this recipe and dtype on the float8 units of `device`.

    Its rowwise products have only bfloat16 outputs.
    """
    dtypes = (torch.bfloat16, torch.float32) if recipe == "tensorwise" else (torch.bfloat16,)
    return dtype in dtypes and support().capability(device) >= (8, 9)


class _Products(torch.autograd.Function):
    """x @ W.T for each of several weights W; the gradients are float8 products too.

    The backward pass saves the input, in float8 if the same cast serves both of its products. It
    saves each weight uncast, so that FSDP2 can free and re-gather it; the weight is cast again.
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
        if scaling.note is not None:
            for index, scale in enumerate(weight_scales):
                scaling.note(index, "weight", scale)
        casts = [
            _cast_weight(w, scale, recipe) for w, scale in zip(weights, weight_scales, strict=True)
        ]
        sizes = [w.size(0) for w in weights]
        outputs = _multiply_joined(casts, sizes, x_cast, x.dtype, scaling, is_forward=True)
        if recipe.rowwise:
            ctx.save_for_backward(rows, *weights)
        else:
            ctx.save_for_backward(*x_cast, *weights, *weight_scales)
        ctx.scaling, ctx.shape, ctx.dtype = scaling, x.shape, x.dtype
        shapes = [(*x.shape[:-1], size) for size in sizes]
        if len(outputs) == 1:
            # Not a view, because FSDP2 warns about views.
            return (torch.ops.aten._unsafe_view(outputs[0], shapes[0]),)
        return tuple(out.reshape(shape) for out, shape in zip(outputs, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gs = [g.reshape(-1, g.size(-1)) for g in gradients]
        is_rowwise = ctx.scaling.recipe.rowwise
        of_rows = _rowwise_gradients if is_rowwise else _tensorwise_gradients
        x_gradient, weight_gradients = of_rows(ctx, gs)
        if x_gradient is not None:
            x_gradient = x_gradient.reshape(ctx.shape)
        return None, x_gradient, *weight_gradients


Gradients = tuple[Tensor | None, Sequence[Tensor | None]]


def _tensorwise_gradients(ctx: Any, gs: Sequence[Tensor]) -> Gradients:
    scaling, dtype, count = ctx.scaling, ctx.dtype, len(gs)
    recipe, saved, needed = scaling.recipe, ctx.saved_tensors, ctx.needs_input_grad[1:]
    x = Cast(saved[0], saved[1])
    weights, scales = saved[2 : 2 + count], saved[2 + count :]
    over = scaling.over_all("out")
    amaxes = reduce_max([(amax_of(g, None), over) for g in gs])
    g_casts = [
        cast(g, scale_of(amax, recipe.gradient_dtype, recipe), recipe.gradient_dtype)
        for g, amax in zip(gs, amaxes, strict=True)
    ]
    if scaling.note is not None:
        for index, g_cast in enumerate(g_casts):
            scaling.note(index, "gradient", g_cast.scale)
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


def _rowwise_gradients(ctx: Any, gs: Sequence[Tensor]) -> Gradients:
    scaling, dtype, count = ctx.scaling, ctx.dtype, len(gs)
    recipe, saved, needed = scaling.recipe, ctx.saved_tensors, ctx.needs_input_grad[1:]
    x, *weights = saved
    over_features, over_tokens = scaling.over_features("out"), scaling.over_tokens()
    # For the input's gradient: amaxes of the output gradients per token, and of the weights per
    # input feature. For the weights' gradients: of the output gradients and the input per feature.
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
    """This rank's amax of the input of the forward product, and the groups to reduce it over."""
    if scaling.recipe.rowwise:
        return amax_of(rows, 1), scaling.over_features("in")
    return amax_of(rows, None), scaling.over_all("in")


def amax_of(x: Tensor, dim: int | None) -> Tensor:
    """The largest magnitude of this rank's part of a matrix, or of each of its rows or columns."""
    magnitudes = x.abs()
    if dim is None:
        # Selective activation checkpointing saves the output of max (SAVED_OPERATORS).
        return magnitudes.max() if x.numel() else magnitudes.new_zeros(())
    return magnitudes.amax(dim, keepdim=True)


def reduce_max(amaxes: Sequence[tuple[Tensor, Groups]]) -> list[Tensor]:
    """Reduce each amax by MAX over its groups; amaxes with the same groups share a collective."""
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
    """The scale that maps an amax to the largest value of `dtype`, in float32 as in torchao."""
    # The division is in float64, so that compiled and eager code agree.
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()
    if recipe.power_of_two:
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Cast:
    """`x` times its scale, cast to float8; values that are too large saturate."""
    most = torch.finfo(dtype).max
    return Cast((x.float() * scale).clamp(-most, most).to(dtype), scale)


def _cast_weight(weight: Tensor, scale: Tensor, recipe: Recipe) -> Cast:
    if isinstance(weight, Float8Weight):
        return Cast(weight.data8, scale)
    return cast(weight, scale, recipe.dtype)


def _values(operand: Cast, dtype: torch.dtype) -> Tensor:
    """The values of a float8 matrix, divided by its scale, in at least float32."""
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
    if missing := -a_data.size(1) % MULTIPLE:  # append columns of zeros
        a_data, b_data = (
            nn.functional.pad(data.view(torch.uint8), (0, missing)).view(data.dtype)
            for data in (a_data, b_data)
        )
    return addmm_float8_unwrapped(
        a_data,
        a.scale.contiguous(),
        b_data.t(),
        b.scale.t().contiguous() if b.scale.ndim else b.scale,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


def _multiply_joined(
    parts: Sequence[Cast],
    sizes: Sequence[int],
    x: Cast,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    is_forward: bool = False,
) -> list[Tensor]:
    """x @ part.T for each part in the forward pass, part @ x.T otherwise.

    The parts are joined into one product if it can keep a scale for each: with rowwise scales, or
    if products are emulated.
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
    """The sum of a @ b.T over pairs, as one product if products are emulated."""
    if scaling.hardware or len(a) == 1:
        first, *others = [
            _multiply(one, other, dtype, scaling, fast=False)
            for one, other in zip(a, b, strict=True)
        ]
        return sum(others, first)
    left = torch.cat([_values(one, dtype) for one in a], dim=1)
    right = torch.cat([_values(one, dtype) for one in b], dim=1)
    return (left @ right.t()).to(dtype)
