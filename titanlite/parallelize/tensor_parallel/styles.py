"""TP styles that compute on local shards.

They correspond to PyTorch's ColwiseParallel, RowwiseParallel and SequenceParallel: parameters are
DTensors, and DTensor runs the collectives. But the computation between two collectives runs on
plain tensors, because DTensor's dispatch costs about 100 microseconds per operator and rank, on CPU
a tenth of a small model's step. A plan may mix these styles with PyTorch's.

If the class of a linear layer has a method `product(x, weight)` on plain tensors, the styles call
it, so a low-precision layer keeps its precision when it is sharded. Its forward must equal that
product plus the bias. If the class also has `products(layers, x, weights)`, layers that share an
input are multiplied by one call of it.

GatherColwise and RowwiseLocal have a ring form: one operator that overlaps collective and product
(ring_product.py).
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.stateless import _reparametrize_module

from titanlite.errors import TitanliteError
from titanlite.modules.dropout import TokenDropout
from titanlite.parallelize.async_tensor_parallel.ring_product import gather_product, product_scatter


class RingStyle(ParallelStyle):
    """A style whose collective and product can be fused into a ring of P2P transfers."""

    is_ring = False

    def as_ring(self) -> "RingStyle":
        """A copy of this style that overlaps its collective with its product."""
        ring = copy.copy(self)
        ring.is_ring = True
        return ring

    def _require_plain_product(self, layer: nn.Module, name: str = "") -> None:
        """Raises TitanliteError if this is a ring and `layer` does not multiply as nn.Linear."""
        if self.is_ring and _has_product(layer):
            who = f"{name}, a {type(layer).__name__}," if name else f"a {type(layer).__name__}"
            raise TitanliteError(
                f"{type(self).__name__} as a ring multiplies as nn.Linear does, but {who} has its "
                "own product; disable asynchronous tensor parallelism, or use nn.Linear itself"
            )


class GatherColwise(RingStyle):
    """Gather a module's input once for several linear layers, sharded by their output features.

    The module passes the first argument of its forward to its children `layers`, and uses it for
    nothing else. Input: this argument's local shard along `dim`, which is all-gathered in the
    forward pass; its gradient is reduce-scattered. Output of each layer: the local shard of the
    last dimension. The layers run as one matrix product; those with a method `product`, such as
    float8 layers, run one by one.
    """

    def __init__(self, dim: int, *layers: str) -> None:
        super().__init__()
        self.dim = dim
        self.layers = layers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers: dict[str, Any] = {name: module.get_submodule(name) for name in self.layers}
        for name, layer in layers.items():
            _require(layer, nn.Linear, self, name)
            self._require_plain_product(layer, name)
            placements = {"weight": Shard(0), "bias": Shard(0)}
            distribute(layer, device_mesh, placements, self.src_data_rank)
            # The hook below replaces the shared input by a dictionary of all layers' outputs.
            replace_forward(layer, lambda _, outputs, name=name: outputs[name])

        group = device_mesh.get_group()
        argument = next(iter(inspect.signature(module.forward).parameters), "")

        def gather(shard: Tensor) -> Tensor:
            cut = DTensor.from_local(shard, device_mesh, [Shard(self.dim)], run_check=False)
            whole = cut.redistribute(placements=[Replicate()])
            return whole.to_local(grad_placements=[Partial()])

        def gather_and_multiply(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if not args and argument not in kwargs:
                raise TitanliteError(
                    f"GatherColwise gathers '{argument}', the first argument of "
                    f"{type(module).__name__}.forward, which was called without it"
                )
            shard = args[0] if args else kwargs[argument]
            if self.is_ring:
                weights = [_local(layer.weight) for layer in layers.values()]
                weight = torch.cat(weights)
                with _joined_again(weight, weights):
                    joined = gather_product(shard, weight, self.dim, group)
                products = list(joined.split([w.size(0) for w in weights], dim=-1))
            else:
                products = _products(layers, gather(shard))
            outputs = {
                name: product if layer.bias is None else product + _local(layer.bias)
                for (name, layer), product in zip(layers.items(), products, strict=True)
            }
            if args:
                return (outputs, *args[1:]), kwargs
            return args, {**kwargs, argument: outputs}

        module.register_forward_pre_hook(gather_and_multiply, with_kwargs=True)
        return module


class RowwiseLocal(RingStyle):
    """A linear layer sharded by its input features; its output is scattered along `scatter_dim`.

    Input: the local shard of the last dimension. Output: that along `scatter_dim`. The forward pass
    has a reduce-scatter, the backward pass an all-gather.
    """

    def __init__(self, scatter_dim: int) -> None:
        super().__init__()
        self.scatter_dim = scatter_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require(module, nn.Linear, self)
        self._require_plain_product(module)
        distribute(
            module, device_mesh, {"weight": Shard(1), "bias": Replicate()}, self.src_data_rank
        )

        group = device_mesh.get_group()

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            weight = _local(module.weight)
            if self.is_ring:
                output = product_scatter(x, weight, self.scatter_dim, group)
            else:
                partial = _product(module, x, weight)
                output = moved(partial, device_mesh, Partial(), Shard(self.scatter_dim))
            return output if module.bias is None else output + _local(module.bias, Partial())

        return replace_forward(module, forward)


class NormLocal(ParallelStyle):
    """A replicated norm, applied to a local shard of the sequence, or of heads normed one by one.

    Takes RMSNorm, LayerNorm, and any other module without submodules whose parameters are vectors
    that it applies to each position. Input and output: the local shard. The gradients of its
    parameters are Partial over the ranks; FSDP2 reduces them, or the step before the gradient norm.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = dict(module.named_parameters(recurse=False))
        is_other = not isinstance(module, nn.RMSNorm | nn.LayerNorm)
        if is_other and (any(module.children()) or any(p.ndim != 1 for p in own.values())):
            _require(module, (nn.RMSNorm, nn.LayerNorm), self)
        plain = type(module).forward
        distribute(module, device_mesh, dict.fromkeys(own, Replicate()), self.src_data_rank)

        def other(module: nn.Module, x: Tensor) -> Tensor:
            local = {name: _local(p, Partial()) for name, p in module._parameters.items()}
            with _reparametrize_module(module, local):
                return plain(module, x)

        if is_other:
            return replace_forward(module, other)
        _require(module, (nn.RMSNorm, nn.LayerNorm), self)

        def rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
            weight = _local(module.weight, Partial())
            return F.rms_norm(x, module.normalized_shape, weight, module.eps)

        def layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
            weight, bias = _local(module.weight, Partial()), _local(module.bias, Partial())
            return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)

        return replace_forward(module, rms_norm if isinstance(module, nn.RMSNorm) else layer_norm)


class EmbeddingLocal(ParallelStyle):
    """A replicated embedding table, in which each rank looks up only its part of the output.

    Input: indices, the same on every rank. Output: the local shard along `dim` of the embeddings,
    or all of them if `dim` is None. There is no collective; the table's gradient is Partial over
    the ranks. This is cheaper than sharding by rows if the table is smaller than the activations.
    """

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require(module, nn.Embedding, self)
        distribute(module, device_mesh, {"weight": Replicate()}, self.src_data_rank)

        def forward(module: nn.Embedding, indices: Tensor) -> Tensor:
            if self.dim is None:
                return F.embedding(indices, _local(module.weight), module.padding_idx)
            own = indices.chunk(device_mesh.size(), dim=self.dim)[device_mesh.get_local_rank()]
            return F.embedding(own, _local(module.weight, Partial()), module.padding_idx)

        return replace_forward(module, forward)


class EmbeddingRowwise(ParallelStyle):
    """An embedding table sharded by its rows, the vocabulary; its output is scattered.

    Input: indices, the same on every rank. Output: the local shard along `scatter_dim` of the
    embeddings. Each rank looks up the indices in its rows, and a reduce-scatter adds the parts; the
    backward pass has an all-gather. A table with fewer rows than ranks is replicated instead, as in
    EmbeddingLocal.
    """

    def __init__(self, scatter_dim: int) -> None:
        super().__init__()
        self.scatter_dim = scatter_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require(module, nn.Embedding, self)
        num_rows: Any = module.num_embeddings
        padding: Any = module.padding_idx
        distribute(module, device_mesh, {"weight": Shard(0)}, self.src_data_rank)
        # As DTensor shards unevenly: all ranks but the last ones have equally many rows.
        rows = -(-num_rows // device_mesh.size())
        first = device_mesh.get_local_rank() * rows
        if padding is not None:
            padding = padding - first if first <= padding < first + rows else None

        def forward(module: nn.Embedding, indices: Tensor) -> Tensor:
            table = _local(module.weight)
            own = indices - first
            is_elsewhere = (own < 0) | (own >= table.size(0))
            found = F.embedding(own.masked_fill(is_elsewhere, 0), table, padding)
            found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
            return moved(found, device_mesh, Partial(), Shard(self.scatter_dim))

        return replace_forward(module, forward)


class TokenDropoutLocal(ParallelStyle):
    """Applies a TokenDropout (modules/dropout.py) to the local shard of its input along `dim`.

    Along the batch or the sequence, each rank uses the numbers of its own tokens (`token_numbers`
    of Batch). If `dim` is -1, the features are sharded, and each rank uses its columns of the
    masks. No collective.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require(module, TokenDropout, self)
        rank, num_ranks = device_mesh.get_local_rank(), device_mesh.size()

        def forward(module: TokenDropout, x: Tensor, token_numbers: Tensor | None = None) -> Tensor:
            if self.dim == -1:
                return TokenDropout.forward(module, x, token_numbers, rank * x.size(-1))
            if token_numbers is not None:
                token_numbers = token_numbers.chunk(num_ranks, dim=self.dim)[rank]
            return TokenDropout.forward(module, x, token_numbers)

        return replace_forward(module, forward)


def _has_product(layer: nn.Module) -> bool:
    return hasattr(type(layer), "product")


def _product(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by the layer's own `product` if it has one; `weight` may be a shard."""
    return layer.product(x, weight) if _has_product(layer) else F.linear(x, weight)


def _products(layers: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """The product of `x` with each layer's local weight; one call of `products` per class."""
    # Compiled code that fuses no product with a collective would keep the joined weights.
    is_compiled = torch.compiler.is_compiling() and not torch._inductor.config._micro_pipeline_tp
    found: dict[str, Tensor] = {}
    joined: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        together = getattr(type(layer), "products", None)
        if together is None and (_has_product(layer) or is_compiled):
            found[name] = _product(layer, x, _local(layer.weight))
        else:
            joined.setdefault(together, []).append(name)
    for together, names in joined.items():
        members = [layers[name] for name in names]
        weights = [_local(layer.weight) for layer in members]
        if together is not None:
            products = together(members, x, weights)
        else:
            weight = torch.cat(weights)
            with _joined_again(weight, weights):
                whole = F.linear(x, weight)
            products = whole.split([w.size(0) for w in weights], dim=-1)
        found.update(zip(names, products, strict=True))
    return [found[name] for name in layers]


def _joined_again(joined: Tensor, parts: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Inside, autograd saves nothing in place of `joined`, and joins `parts` for the backward pass.

    A copy would be kept for every block and microbatch; the parts are parameters. (Compiled code
    keeps it.) Other hooks, such as activation checkpointing's, would not see these.
    """
    hooks: Any = torch._C._autograd
    if torch.compiler.is_compiling() or hooks._top_saved_tensors_default_hooks(True) is not None:
        return contextlib.nullcontext()
    own, parts = joined.untyped_storage()._cdata, [part.detach() for part in parts]

    def pack(saved: Tensor) -> Any:
        is_own = saved.untyped_storage()._cdata == own
        return (saved.size(), saved.stride(), saved.storage_offset()) if is_own else saved

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.cat(parts).as_strided(*packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _local(parameter: Tensor | None, grad_placement: Placement | None = None) -> Any:
    """A parameter's local shard. Its gradient has `grad_placement`, or the parameter's own."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=None if grad_placement is None else [grad_placement])


def moved(x: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Tensor:
    """The local part of a tensor placed as `wanted`, from its local part `x` placed as `given`."""
    placed = DTensor.from_local(x, mesh, [given], run_check=False)
    return placed.redistribute(placements=[wanted]).to_local()


def distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement],
    src_data_rank: int | None,
) -> None:
    """Make the own parameters of `module` DTensors with these placements, by name."""
    for key, own in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(own, mesh, [placements[key]], src_data_rank=src_data_rank)
        module.register_parameter(key, nn.Parameter(cut, own.requires_grad))


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    """Make `forward(module, ...)` the forward of `module`, and return the module."""
    module.forward = MethodType(forward, module)
    return module


def _require(
    module: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    style: ParallelStyle,
    name: str = "",
) -> None:
    """Raises TitanliteError unless `module` computes what `style` computes in its place.

    A subclass with another forward (LoRA, another norm) would be trained as the plain layer.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    base = next((k for k in kinds if isinstance(module, k)), None)
    kind_name = type(module).__name__
    who = f"{'an' if kind_name[0] in 'AEIOU' else 'a'} {kind_name}"
    who = f"{name}, {who}" if name else who
    if base is None:
        names = " or ".join(k.__name__ for k in kinds)
        raise TitanliteError(f"{type(style).__name__} is for {names}, and this is {who}")
    reason = ""
    has_own = type(module).forward is not base.forward and not _has_product(module)
    if has_own or "forward" in vars(module):
        reason = "has a forward of its own"
    elif is_parametrized(module):
        reason = "has parametrized weights"
    elif more := {key for key, _ in module.named_parameters(recurse=False)} - {"weight", "bias"}:
        reason = f"has more parameters ({', '.join(sorted(more))})"
    elif base is nn.Embedding:
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        given = " and ".join(option for option in options if getattr(module, option))
        reason = f"has {given} set" if given else ""
    if reason:
        raise TitanliteError(
            f"{type(style).__name__} computes a plain {base.__name__}, but {who}, {reason}, which "
            f"it would ignore; use {INSTEAD[base]} of torch.distributed.tensor.parallel, which "
            "calls the module itself"
        )


INSTEAD: dict[type[nn.Module], str] = {
    nn.Linear: "ColwiseParallel or RowwiseParallel",
    nn.Embedding: "RowwiseParallel or ColwiseParallel",
    nn.RMSNorm: "SequenceParallel",
    nn.LayerNorm: "SequenceParallel",
    TokenDropout: "another style",
}
