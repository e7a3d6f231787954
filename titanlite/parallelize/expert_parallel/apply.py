"""apply_ep: spread the experts of a model over ranks; every token goes to the ranks of its experts.

Under tensor parallelism, an expert layer works on the shards of the sequence that its block has
between its halves. So a token is dispatched once, by the rank that holds it, and nothing is
gathered for the routed experts. The gate is replicated (GateLocal). If blocks have whole sequences
instead, each rank takes its shard of the tokens and the outputs are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.errors import TitanliteError
from titanlite.modules.experts import ExpertLayer, Gate, expert_layers
from titanlite.modules.experts.dispatch import Exchange
from titanlite.modules.gradient_sums import clear_sums, sum_gradient
from titanlite.parallelize.arguments import Plan, as_plan, check_mesh, check_model
from titanlite.parallelize.tensor_parallel.apply import shards_sequence
from titanlite.parallelize.tensor_parallel.styles import _local, distribute, moved, replace_forward


class GateLocal(ParallelStyle):
    """A replicated gate of a router on the local shard of the sequence.

    Input and output: the local shard. The gradient of its weight is Partial over the ranks; FSDP2
    reduces it, or the step does so before it computes the gradient norm.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Gate):
            raise TitanliteError(f"GateLocal is for Gate, and this is a {type(module).__name__}")
        distribute(module, device_mesh, {"weight": Replicate()}, self.src_data_rank)

        def forward(module: Gate, x: Tensor) -> Tensor:
            return module.product(x, _local(module.weight, Partial()))

        return replace_forward(module, forward)


@dataclass(frozen=True)
class ExpertParallelReport:
    """What apply_ep did: the expert layers that it found."""

    layers: tuple[str, ...]


def apply_ep(
    model: nn.Module,
    ep_mesh: DeviceMesh | None,
    *,
    tp_mesh: DeviceMesh | None = None,
    cp_mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
) -> ExpertParallelReport:
    """Spread the experts of every expert layer of `model` over the 1-D `ep_mesh`, in place.

    Each rank of `ep_mesh` has its own tokens, and equally many experts. With None, the layers only
    learn over which meshes the tokens of a sequence are sharded: `tp_mesh` (after apply_tp) and
    `cp_mesh`. `plan`, by default that of the model's class, says whether TP shards the sequence
    between blocks; if not, a layer shards its tokens and gathers its output. Without expert
    parallelism, the experts' gradients are marked to be summed over `tp_mesh`, unless apply_fsdp
    gets a mesh of their own.

    Raises TitanliteError for an invalid argument, and if the number of ranks does not divide the
    number of experts.
    """
    check_model("apply_ep", model)
    for name, mesh in (("ep_mesh", ep_mesh), ("tp_mesh", tp_mesh), ("cp_mesh", cp_mesh)):
        if mesh is not None:
            check_mesh("apply_ep", name, mesh)
    layers = expert_layers([model])
    groups = tuple(mesh.get_group().group_name for mesh in (cp_mesh, tp_mesh) if mesh is not None)
    has_whole_tokens = False
    if layers and tp_mesh is not None:
        has_whole_tokens = not shards_sequence(as_plan("apply_ep", model, plan))
    for name, layer in layers.items():
        layer.sequence_groups = groups
        if tp_mesh is not None:
            layer.token_shard = tp_mesh.get_local_rank(), tp_mesh.size()
            if has_whole_tokens:
                _shard_tokens(
                    layer if isinstance(layer, ExpertLayer) else layer.experts, tp_mesh, name
                )
        clear_sums(layer.experts)
        if ep_mesh is None or ep_mesh.size() == 1:
            if tp_mesh is not None:
                for leaf, _ in layer.experts.named_parameters():
                    sum_gradient(layer.experts, leaf, "tp", tp_mesh.get_group())
            continue
        if layer.num_experts % ep_mesh.size():
            raise TitanliteError(
                f"apply_ep: {ep_mesh.size()} ranks do not divide the {layer.num_experts} experts "
                f"of {name}; use a number of ranks that does"
            )
        placements = {leaf: Shard(0) for leaf, _ in layer.experts.named_parameters()}
        distribute(layer.experts, ep_mesh, placements, None)
        layer.experts.exchange = Exchange(ep_mesh.get_group())
    return ExpertParallelReport(tuple(layers))


def _shard_tokens(module: Any, tp_mesh: DeviceMesh, name: str) -> None:
    """Route this rank's shard of the tokens, which are whole on all ranks; gather the outputs."""
    routed = module._routed

    def of_shard(*wholes: Tensor, **more: Any) -> Tensor:
        if len(wholes[0]) % tp_mesh.size():
            raise TitanliteError(
                f"{name}: the {tp_mesh.size()} ranks of tp do not divide its {len(wholes[0])} "
                "tokens; give a sequence length or a tensor-parallel degree that fits"
            )
        own = (moved(whole, tp_mesh, Replicate(), Shard(0)) for whole in wholes)
        return moved(routed(*own, **more), tp_mesh, Shard(0), Replicate())

    # An attribute of the instance comes before the method of the class.
    module.__dict__["_routed"] = of_shard
