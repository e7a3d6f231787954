"""Float8 layers on one process: their numbers, which layers they are, what is refused."""

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config import JobConfig, checks, resolve_job
from titanlite.errors import ConfigError, TitanliteError
from titanlite.mesh.device_mesh import build_meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize import apply_float8
from titanlite.parallelize.float8 import linear as float8_linear
from titanlite.parallelize.float8.apply import choose_layers, compact, describe_skipped
from titanlite.parallelize.float8.linear import AmaxGroups, Float8Linear, Float8Weight
from titanlite.parallelize.float8.torchao import RECIPES, find_recipe, load_torchao
from titanlite.start import check_start
from titanlite.tools.planner.fake_world import fake_world
from titanlite.tools.verify.jobs import microbatches_of, reference_job

FLOAT8 = {"converters": ["quantize.linear.float8"]}


def rows_of_unlike_size(*shape: int, dtype: torch.dtype) -> Tensor:
    sizes = torch.logspace(-2, 2, shape[-2])[:, None]
    return (torch.randn(*shape) * sizes).to(dtype)


def passes(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(gradient)
    assert x.grad is not None
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_computes_what_torchaos_own_computes(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48).to(dtype)
    ao = load_torchao()
    config = replace(ao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = ao.float8_linear.Float8Linear.from_float(copy.deepcopy(plain), config)
    ours = Float8Linear(plain, find_recipe(recipe), AmaxGroups())
    x, gradient = (rows_of_unlike_size(3, 32, size, dtype=dtype) for size in (64, 48))
    for own, expected in zip(passes(ours, x, gradient), passes(theirs, x, gradient), strict=True):
        assert torch.equal(own, expected)
    assert not torch.equal(ours(x), F.linear(x, plain.weight, plain.bias))


def skip_without_kernel(recipe: str) -> None:
    """Skip a test of scales by row where torch's CPU kernel takes scales of tensors alone."""
    if "rowwise" in recipe:
        one, scale = torch.ones(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
        try:
            torch._scaled_mm(one, one.T, scale, scale.T, out_dtype=torch.bfloat16)
        except RuntimeError as error:
            pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_scaled_mm_multiplies_as_the_emulation_does(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its reference on the CPU; 40 tokens, which are filled up to what it takes."""
    skip_without_kernel(recipe)
    torch.manual_seed(0)
    layer = Float8Linear(nn.Linear(64, 48).bfloat16(), find_recipe(recipe), AmaxGroups())
    x, gradient = (rows_of_unlike_size(40, size, dtype=torch.bfloat16) for size in (64, 48))
    emulated = passes(layer, x, gradient)
    calls = []
    scaled_mm = torch._scaled_mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(float8_linear, "has_hardware", lambda *_: True)
    monkeypatch.setattr(torch, "_scaled_mm", counted)
    for own, expected in zip(passes(layer, x, gradient), emulated, strict=True):
        scale = expected.abs().max()
        assert ((own - expected).abs().max() / scale) < 2**-7
    assert len(calls) == (2 if recipe == "rowwise_with_gw_hp" else 3)


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_joined_projections_compute_what_each_computes_alone(
    recipe: str, hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very different size: one scale for all would leave nothing of the smallest."""
    if hardware:
        skip_without_kernel(recipe)
    torch.manual_seed(0)
    monkeypatch.setattr(float8_linear, "has_hardware", lambda *_: hardware)
    dtype = torch.bfloat16 if hardware else torch.float64
    x = rows_of_unlike_size(24, 64, dtype=dtype)
    plain = [nn.Linear(64, rows, bias=False).to(dtype) for rows in (64, 32, 16)]
    sizes = (1.0, 1e4, 1e-4)
    with torch.no_grad():
        for layer, size in zip(plain, sizes, strict=True):
            layer.weight.mul_(size)
    layers = [Float8Linear(layer, find_recipe(recipe), AmaxGroups()) for layer in plain]
    gradients = [torch.randn(24, 64).to(dtype) / 1e4, torch.randn(24, 32).to(dtype) / 1e9]
    gradients.append(torch.randn(24, 16).to(dtype))
    alone = [passes(layer, x, g) for layer, g in zip(layers, gradients, strict=True)]
    own = x.detach().requires_grad_()
    outputs = Float8Linear.products(layers, own, [layer.weight for layer in layers])
    for layer in layers:
        layer.zero_grad()
    torch.autograd.backward(outputs, gradients)
    tolerance = 2**-6 if hardware else 1e-13
    for output, layer, expected in zip(outputs, layers, alone, strict=True):
        assert layer.weight.grad is not None
        for one, other in ((output, expected[0]), (layer.weight.grad, expected[2])):
            assert ((one - other).abs().max() / other.abs().max()) < tolerance
    total = sum(expected[1] for expected in alone)
    assert own.grad is not None
    assert ((own.grad - total).abs().max() / total.abs().max()) < tolerance


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(32, 32) for i in range(12)})
        self.odd = nn.Linear(32, 17)
        self.output = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def test_layers_are_chosen_by_name_and_whole_shape() -> None:
    model = Small()
    chosen, skipped = choose_layers(model, "rowwise", ["output"])
    assert chosen == [f"layers.{i}" for i in range(12)]
    assert compact(chosen) == ["layers.*"]
    assert describe_skipped(skipped) == "odd (17 is not a multiple of 16); output (named by output)"
    report = apply_float8(model, "rowwise", filter_fqns=["layers.1"])
    assert report.converted == (*(f"layers.{i}" for i in (0, *range(2, 10))), "output")
    assert isinstance(model.layers["2"], Float8Linear)
    assert type(model.layers["11"]) is nn.Linear
    model(torch.randn(4, 32))


def test_the_automatic_filter_is_torchaos() -> None:
    large = nn.ModuleDict({"wide": nn.Linear(4096, 4096), "small": nn.Linear(1024, 1024)})
    for recipe in ("tensorwise", "rowwise"):
        chosen, skipped = choose_layers(large, recipe, ["auto_filter_small_kn"])
        assert (chosen, skipped) == (["wide"], {"small": "too small to gain"})


def test_where_no_layer_is_left_that_is_an_error() -> None:
    with pytest.raises(TitanliteError, match=r"no linear layer of Small is left .*named"):
        apply_float8(Small(), filter_fqns=["layers", "output"])


def test_a_layer_that_something_else_multiplies_is_an_error() -> None:
    model = Small()
    apply_float8(model)
    layer: Any = model.layers["3"]
    layer.forward = lambda x: F.linear(x, layer.weight)
    with pytest.raises(TitanliteError, match=r"layers\.3 is a float8 layer, but the forward pass"):
        model(torch.randn(4, 32))


def test_a_weight_gathered_in_float8_is_multiplied_by_its_layer_alone() -> None:
    weight = Float8Weight(
        torch.ones(16, 16, dtype=torch.float8_e4m3fn), torch.tensor(2.0), torch.float32
    )
    with pytest.raises(TitanliteError, match="that was gathered in float8; call the layer's"):
        F.linear(torch.ones(2, 16), weight)
    layer = Float8Linear(
        nn.Linear(16, 16, bias=False), find_recipe("tensorwise"), AmaxGroups(), emulate=True
    )
    assert torch.equal(layer.product(torch.ones(2, 16), weight), torch.full((2, 16), 8.0))


def test_torchao_is_imported_in_silence() -> None:
    code = "from titanlite.parallelize.float8.torchao import load_torchao; load_torchao()"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "default::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def job(**changes: dict[str, Any]) -> JobConfig:
    sections: dict[str, Any] = {
        "job": {"device": "cpu"},
        "model": {"flavor": "debug", **FLOAT8},
        "training": {"global_batch_size": 8, "local_batch_size": 2},
        "parallelism": {"data_parallel_shard_degree": 1},
    }
    for name, keys in changes.items():
        sections[name] = {**sections.get(name, {}), **keys}
    return JobConfig.from_dict(sections)


def float8(**keys: Any) -> dict[str, Any]:
    return {"linear": {"float8": keys}}


def problem_of(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True},
            'quantize.linear.float8.enable_fsdp_float8_all_gather: "rowwise" scales rows and '
            "columns separately, but a gathered weight has one scale; set it to false, or set "
            'recipe_name to "tensorwise"',
        ),
        (
            {"precompute_float8_dynamic_scale_for_fsdp": True},
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp: has no effect unless "
            "weights are gathered in float8; set enable_fsdp_float8_all_gather = true, or remove "
            "this key",
        ),
        (
            {"recipe_name": "rowwise_with_gw_hp", "filter_fqns": ["auto_filter_small_kn"]},
            'quantize.linear.float8.filter_fqns: torchao does not support "auto_filter_small_kn" '
            'with "rowwise_with_gw_hp"; remove it, or set recipe_name to "rowwise"',
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], problem: str) -> None:
    assert problem_of(lambda: resolve_job(job(quantize=float8(**keys)))) == problem
    # Without the converter they say nothing.
    resolve_job(job(model={"converters": []}, quantize=float8(**keys)))


def test_without_torchao_a_job_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = checks.importlib.util.find_spec
    monkeypatch.setattr(
        checks.importlib.util,
        "find_spec",
        lambda name: None if name == "torchao" else find_spec(name),
    )
    assert problem_of(lambda: resolve_job(job())) == (
        "model.converters: float8 needs the package torchao, which is not installed; "
        'pip install "titanlite[float8]"'
    )


def test_what_float8_units_refuse_is_known_before_ranks_start() -> None:
    split = {"parallelism": {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1}}
    assert problem_of(lambda: check_start(job(**split))) == (
        "parallelism.tensor_parallel_degree: layers.*.attention.wq has 32 output features; split "
        "over 4 ranks they are not a multiple of 16, which float8 units require; give a smaller "
        "degree, name the layer in quantize.linear.float8.filter_fqns, or set "
        "quantize.linear.float8.emulate = true"
    )
    check_start(job(**split, quantize=float8(emulate=True)))
    # wo and w2 are cut by their input features.
    left = ["wq", "wk", "wv", "w1", "w3"]
    found = problem_of(lambda: check_start(job(**split, quantize=float8(filter_fqns=left))))
    assert "layers.*.attention.wo has 32 input features" in found


def test_no_layer_left_is_known_before_ranks_start() -> None:
    filtered = job(quantize=float8(filter_fqns=["layers"]))
    assert problem_of(lambda: check_start(filtered)) == (
        "model.converters: no linear layer of ImageTransformer is left to convert to "
        "float8: layers.*.attention.wq, layers.*.attention.wk, layers.*.attention.wv, "
        "layers.*.attention.wo, layers.*.feed_forward.w1, layers.*.feed_forward.w2, "
        "layers.*.feed_forward.w3 (named by layers); output (17 is not a multiple of 16); change "
        "quantize.linear.float8.filter_fqns or the model's sizes, or remove the converter"
    )


def test_other_converters_are_refused_by_name() -> None:
    assert problem_of(lambda: job(model={"converters": ["quantize.linear.mx"]})) == (
        'model.converters: "quantize.linear.mx" asks for a TorchTitan feature that titanlite does '
        'not have; give a list of "quantize.linear.float8"'
    )


def test_the_reference_takes_the_microbatches_that_all_ranks_take_together() -> None:
    split = {"parallelism": {"data_parallel_shard_degree": 2}}
    plan = resolve_job(job(**split))
    assert microbatches_of(plan).of(8) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    assert reference_job(plan).config.training.local_batch_size == 4
    stages = {"parallelism": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}}
    piped = resolve_job(job(**stages))
    ranges = [[range(i, i + 1), range(i + 4, i + 5)] for i in range(4)]
    assert microbatches_of(piped).of(8) == ranges
    assert microbatches_of(resolve_job(job(model={"converters": []}, **split))) is None


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_amaxes_have_groups_apart_from_fsdps(rank: int) -> None:
    """So that NCCL, which runs the collectives of a group in order, does not let them wait."""
    dims = ParallelDims(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    with fake_world(rank, dims.world_size):
        meshes = build_meshes(dims, "cpu", has_tokens=True)
        own, fsdp = (mesh.get_all_groups() for mesh in (meshes.tokens, meshes.dp))
        assert [*map(dist.get_process_group_ranks, own)] == [
            dist.get_process_group_ranks(group) for group in fsdp
        ]
        assert not {group.group_name for group in own} & {group.group_name for group in fsdp}
        assert meshes.axes_of_groups().keys() >= {group.group_name for group in own}
