"""What the apply_* say of a wrong argument: one line, what is wrong and what to give instead."""

# ruff: noqa: E501

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.errors import TitanliteError
from titanlite.parallelize import (
    ParallelPlan,
    apply_ac,
    apply_compile,
    apply_cp,
    apply_ddp,
    apply_fsdp,
    apply_tp,
)

PLAN = ParallelPlan()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two axes of the first of four ranks; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


def make_model() -> nn.Module:
    model = nn.Module()
    model.emb = nn.Embedding(8, 4)
    model.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(2)})
    model.head = nn.Linear(4, 8)
    return model


CASES: list[tuple[Callable[[nn.Module, DeviceMesh], Any], str]] = [
    (lambda m, _: apply_ac(m, "ful", plan=PLAN), 'apply_ac: mode "ful" is not one of its values; did you mean "full"?'),
    (lambda m, _: apply_ac(m, "all", plan=PLAN), 'apply_ac: mode "all" is not one of its values; give "none", "full", "selective" or "memory_budget"'),
    (lambda m, _: apply_ac(m, None, plan=PLAN), 'apply_ac: mode None is not one of its values; give "none", "full", "selective" or "memory_budget"'),
    (lambda m, _: apply_ac(m, selective_option="0", plan=PLAN), "apply_ac: selective_option '0' is not one of its values; give \"op\", or a block interval such as \"2\""),
    (lambda m, _: apply_ac(m, "memory_budget", memory_budget=1.5, plan=PLAN), "apply_ac: memory_budget 1.5 is out of range; give 0 to 1"),
    (lambda m, _: apply_ac(m, recompute_mm_of="wq", plan=PLAN), 'apply_ac: recompute_mm_of is "wq"; give a tuple of names'),
    (lambda m, _: apply_ac(m, determinism_check="off", plan=PLAN), 'apply_ac: determinism_check "off" is not one of its values; give "default" or "none"'),
    (lambda m, _: apply_ac(m, debug="no", plan=PLAN), 'apply_ac: debug is "no"; give True or False'),
    (lambda m, _: apply_ac(m, plan=["layers"]), "apply_ac: plan is a list; give a ParallelPlan, or a dictionary of module name to style"),
    (lambda m, _: apply_ac([m], plan=PLAN), "apply_ac: model is a list; give an nn.Module"),
    (lambda m, _: apply_compile(m, backend="inductr", plan=PLAN), 'apply_compile: backend "inductr" is not one of its values; did you mean "inductor"?'),
    (lambda m, mesh: apply_fsdp(m, mesh["dp_shard"], reshard_after_forward="x", plan=PLAN), 'apply_fsdp: reshard_after_forward "x" is not one of its values; give "default", "always" or "never"'),
    (lambda m, mesh: apply_fsdp(m, mesh["dp_shard"], param_dtype="bfloat16", plan=PLAN), 'apply_fsdp: param_dtype is "bfloat16"; give a floating-point dtype, such as torch.bfloat16, or None'),
    (lambda m, mesh: apply_fsdp(m, 2, plan=PLAN), 'apply_fsdp: dp_mesh is an int; give an axis of a DeviceMesh, as in mesh["tp"]'),
    (lambda m, mesh: apply_ddp(m, mesh), 'apply_ddp: replicate_mesh has 2 axes and takes one; give one of them, as in mesh["dp_shard"]'),
    (lambda m, mesh: apply_tp(m, mesh, PLAN), 'apply_tp: tp_mesh has 2 axes and takes one; give one of them, as in mesh["dp_shard"]'),
    (lambda m, mesh: apply_tp(m, mesh["tp"], {"layers.*": "colwise"}), "apply_tp: plan['layers.*'] is a str, not a style; give a ParallelStyle, such as ColwiseParallel()"),
    (lambda m, mesh: apply_cp(m, mesh["tp"], rotate_method="ring", plan=PLAN), 'apply_cp: rotate_method "ring" is not one of its values; give "alltoall" or "allgather"'),
    (lambda m, mesh: apply_cp(m, mesh["tp"], layout="striped2", plan=PLAN), 'apply_cp: layout "striped2" is not one of its values; did you mean "striped"?'),
    (lambda m, mesh: apply_cp(m, mesh, plan=PLAN), 'apply_cp: cp_mesh has 2 axes and takes one; give one of them, as in mesh["dp_shard"]'),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), CASES, ids=[said[:50] for _, said in CASES])
def test_a_wrong_argument_is_one_line_and_changes_nothing(
    mesh: DeviceMesh, call: Callable[[nn.Module, DeviceMesh], Any], said: str
) -> None:
    model = make_model()
    before = str(model)
    with pytest.raises(TitanliteError) as caught:
        call(model, mesh)
    assert str(caught.value) == said
    assert str(model) == before
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("names", [("dp_shard",), None])
@pytest.mark.parametrize(
    ("plan", "units"),
    [
        # The embeddings and the head are what is left for the root.
        (ParallelPlan(), 3),
        (ParallelPlan(embeddings=("emb",)), 4),
        (ParallelPlan(embeddings=("emb",), head=("head",)), 4),
        ({}, 3),
    ],
)
def test_a_mesh_without_names_is_cut_into_as_many_units(
    mesh: DeviceMesh, plan: Any, units: int, names: tuple[str, ...] | None
) -> None:
    model = make_model()
    own = init_device_mesh("cpu", (4,), mesh_dim_names=names)
    assert apply_fsdp(model, own, plan=plan).num_units == units
    assert all(parameter.to_local().numel() for parameter in model.parameters())


def test_a_dictionary_is_a_plan_everywhere(mesh: DeviceMesh) -> None:
    model, plan = make_model(), {"layers.*": ColwiseParallel()}
    assert apply_tp(model, mesh["tp"], plan).parallelized == ("layers.0", "layers.1")
    assert apply_ac(model, "full", plan=plan).wrapped == ("layers.0", "layers.1")
    assert apply_compile(model, backend="eager", plan=plan).blocks == ("layers.0", "layers.1")
    sharded = apply_fsdp(model, mesh["dp_shard"], param_dtype=torch.bfloat16, plan=plan)
    assert sharded.num_units == 3
