"""Each apply_x on its own, called as a user would call it, against the plain module."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from titanlite.mesh.launch import Place, run_ranks

# torch is imported by the functions that run on ranks, as in any program that starts some.


def on_ranks(function: Callable, num_ranks: int = 4) -> list:
    return run_ranks(_in_world, num_ranks, function, timeout_seconds=120)


def _in_world(place: Place, function: Callable):
    from titanlite.mesh.world import open_world

    with open_world(place) as world:
        return function(world)


def tp_by_hand(world):
    """The notes' plan, by hand, on a bare ImageEmbeddings; also the plan registered for it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    from models.image_transformer.model import ImageEmbeddings
    from titanlite.parallelize import apply_tp
    from titanlite.training.shards import whole_tensor

    def build():
        torch.manual_seed(0)
        return ImageEmbeddings(17, 16, height=8, width=8, channels=1).double()

    tokens = torch.arange(2 * 64).reshape(2, 64) % 17
    reference = build()
    expected = reference(tokens, "cpu")
    expected.square().sum().backward()

    names = ("tok_emb", "row_emb", "col_emb", "chan_emb", "xd_emb")
    by_rows = {
        name: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)) for name in names
    }
    results = []
    for plan in (by_rows, None):
        model = build()
        tp_mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = apply_tp(model, tp_mesh, plan)
        own = model(tokens, "cpu")
        own.square().sum().backward()
        whole = DTensor.from_local(own, tp_mesh, [Shard(1)]).full_tensor()
        torch.testing.assert_close(whole, expected)
        for name, parameter in reference.named_parameters():
            cut = model.get_parameter(name)
            grad = cut.grad.redistribute(placements=cut.placements)
            torch.testing.assert_close(whole_tensor(grad), parameter.grad)
        messages = [str(w.message) for w in caught if "plan key" in str(w.message)]
        results.append((report, messages, str(model.tok_emb.weight.placements)))
    return results


def test_tp_of_bare_embeddings_by_the_notes_plan():
    (by_hand, messages, placements), (registered, no_messages, _) = on_ranks(tp_by_hand)[0]
    assert by_hand.parallelized == ("tok_emb", "row_emb", "col_emb")
    assert by_hand.replicated == ("chan_emb",)  # one row, four ranks
    assert by_hand.unmatched == ("xd_emb",)
    assert messages == [
        "tensor-parallel plan key 'xd_emb' matches no module of ImageEmbeddings; skipped"
    ]
    assert "Shard(dim=0)" in placements
    assert registered.parallelized == by_hand.parallelized
    assert no_messages == []


def styles_with_biases(world):
    """GatherColwise, RowwiseLocal and NormLocal on a module with biases, against the module."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from titanlite.parallelize import apply_tp
    from titanlite.parallelize.styles import GatherColwise, NormLocal, RowwiseLocal
    from titanlite.training.gradient_norm import reduce_partial_gradients
    from titanlite.training.shards import whole_tensor

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(8), Inner()

        def forward(self, x):
            return x + self.inner(self.norm(x), scale=2.0)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x, scale):
            return self.out(self.a(x).tanh() * self.b(x) * scale)

    def build():
        torch.manual_seed(0)
        return Block().double()

    x = torch.randn(8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference = build()
    reference_x = x.clone().requires_grad_()
    expected = reference(reference_x)
    expected.square().sum().backward()

    model = build()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    plan = {
        "norm": NormLocal(),
        "inner": GatherColwise(0, "a", "b"),
        "inner.out": RowwiseLocal(scatter_dim=0),
    }
    apply_tp(model, mesh, plan)
    own_x = x.chunk(world.size)[world.rank].clone().requires_grad_()
    own = model(own_x)
    own.square().sum().backward()
    torch.testing.assert_close(DTensor.from_local(own, mesh, [Shard(0)]).full_tensor(), expected)
    whole_grad = DTensor.from_local(own_x.grad, mesh, [Shard(0)]).full_tensor()
    torch.testing.assert_close(whole_grad, reference_x.grad)
    reduce_partial_gradients(model.parameters())
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(whole_tensor(grad), parameter.grad, msg=name)
    return True


def test_local_styles_equal_the_plain_module():
    assert all(on_ranks(styles_with_biases))


def test_a_style_on_the_wrong_module_says_so():
    from titanlite.errors import TitanliteError

    def wrong(world):
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh

        from titanlite.parallelize import apply_tp
        from titanlite.parallelize.styles import NormLocal

        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        apply_tp(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": NormLocal()})

    with pytest.raises(TitanliteError, match="NormLocal in a tensor-parallel plan cuts RMSNorm or"):
        on_ranks(wrong, num_ranks=1)


def shards_of_every_kind(world):
    """shard_of cuts, and whole_tensor restores, what FSDP2 and TP cut; uneven and empty too."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from titanlite.training.shards import local_part, shard_of, whole_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (1, 3, 8, 17):
        full = torch.arange(rows * 6.0).reshape(rows, 6)
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            cut = distribute_tensor(full, mesh, placements)
            assert torch.equal(shard_of(full, cut), local_part(cut))
            assert torch.equal(whole_tensor(cut), full)
        if rows > 2:
            for style in (ColwiseParallel(), RowwiseParallel()):
                layer = nn.Linear(6, rows, bias=False)
                layer.weight.data.copy_(full)
                parallelize_module(layer, mesh["tp"], style)
                fully_shard(layer, mesh=mesh["dp"])
                assert torch.equal(shard_of(full, layer.weight), local_part(layer.weight))
                assert torch.equal(whole_tensor(layer.weight.detach()), full)
    return True


def test_shards_and_wholes():
    assert all(on_ranks(shards_of_every_kind))


def norm_and_clip(world):
    """The norm counts each element once: cut, replicated, partly replicated and plain."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from titanlite.training.gradient_norm import clip_gradients, gradient_norm
    from titanlite.training.shards import whole_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parameters, fulls = [], []
    for index, (where, placements) in enumerate(
        [
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh["tp"], [Shard(0)]),
            (mesh["tp"], [Replicate()]),
            (mesh["dp_shard"], [Shard(0)]),
            (None, None),
        ]
    ):
        full = torch.randn(5, 4, generator=torch.Generator().manual_seed(index)).double()
        value = full if where is None else distribute_tensor(full, where, placements)
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value.clone()
        parameters.append(parameter)
        fulls.append(full)
    norm = gradient_norm(parameters, mesh)
    expected = torch.cat([full.flatten() for full in fulls]).norm()
    torch.testing.assert_close(norm, expected)
    clip_gradients(parameters, norm, 2 * norm.item())
    for parameter, full in zip(parameters, fulls, strict=True):
        assert torch.equal(whole_tensor(parameter.grad), full), "clipped below the norm"
    clip_gradients(parameters, norm, 0.5)
    torch.testing.assert_close(gradient_norm(parameters, mesh).item(), 0.5, rtol=1e-5, atol=0)
    return True


def test_gradient_norm_and_clipping():
    assert all(on_ranks(norm_and_clip))
