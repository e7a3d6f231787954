"""docs/own_model.md: a registered model without tokens trains and verifies under plans."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pages import write_example
from torch import nn

from titanlite.config import JobConfig, ResolvedJob, parse_args
from titanlite.errors import ConfigError, TitanliteError
from titanlite.models.build import build_model, initial_model
from titanlite.models.spec import ModelSpec
from titanlite.modules.batch import call_model, check_forward, make_batch, set_call
from titanlite.ranks.launch import Place, spawn
from titanlite.register import register_loss
from titanlite.registry import LOSSES
from titanlite.start import check_start
from titanlite.tools.verify.verify import Verifier
from titanlite.training.loss import load_loss

PLANS = {
    "one rank": {},
    "TP x FSDP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
}


@pytest.fixture
def vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page, in a folder from which they can be imported."""
    write_example("vit", "own_model.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("vit", None)


def test_the_page_verifies_under_every_plan(vit: Path) -> None:
    # Ranks of their own: a pool that runs already would not see the folder.
    with Verifier(timeout_seconds=120) as verifier:
        for name, plan in PLANS.items():
            options = [f"--parallelism.{key}={degree}" for key, degree in plan.items()]
            config = parse_args([f"--job.config_file={vit / 'vit.toml'}", *options])
            found = verifier.verify(config, steps=2, reloads=name == "TP x FSDP")
            assert found.agrees, (name, found.findings)


def test_a_sample_of_other_fields_is_one_line(vit: Path) -> None:
    module = vit / "vit.py"
    module.write_text(module.read_text().replace('"targets": None', '"label": None'))
    config = parse_args([f"--job.config_file={vit / 'vit.toml'}"])
    with Verifier(timeout_seconds=120) as verifier, pytest.raises(Exception) as caught:
        verifier.verify(config, steps=1)
    assert (
        "training.dataset: a sample has the fields image, targets, but the data set is registered "
        "with image, label; name in `fields` all but tokens"
    ) in str(caught.value)


class Rotary(nn.Module):
    """A model with complex and float tables, and its own initialization."""

    def __init__(self, sizes: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("scale", torch.ones(2))

    def init_weights(self) -> None:
        self.linear.weight.fill_(float(torch.rand(())))


@pytest.mark.parametrize(
    ("dtype", "of_table", "of_scale"),
    [
        (torch.float32, torch.complex64, torch.float32),
        (torch.float64, torch.complex128, torch.float64),
        (torch.bfloat16, torch.complex64, torch.float32),
    ],
)
def test_buffers_are_never_narrowed(
    dtype: torch.dtype, of_table: torch.dtype, of_scale: torch.dtype
) -> None:
    model = build_model(ModelSpec("rotary", object, Rotary), None, dtype)
    assert model.linear.weight.dtype == dtype
    assert model.table.dtype == of_table
    assert model.scale.dtype == of_scale
    assert torch.allclose(model.table.angle(), torch.arange(3.0, dtype=of_scale))


def test_initial_values_depend_on_the_seed_alone() -> None:
    spec = ModelSpec("rotary", object, Rotary)
    one = initial_model(spec, None, torch.float32, seed=1)
    torch.rand(5)
    before = torch.get_rng_state()
    again = initial_model(spec, None, torch.float32, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    other = initial_model(spec, None, torch.float32, seed=2)
    assert torch.equal(one.linear.weight, again.linear.weight)
    assert torch.equal(one.linear.bias, again.linear.bias)
    assert not torch.equal(one.linear.weight, other.linear.weight)
    assert len(one.linear.weight.unique()) == 1
    given = ModelSpec("rotary", object, Rotary, init=lambda model: model.linear.weight.fill_(3.0))
    own = initial_model(given, None, torch.float32, seed=1)
    assert own.linear.weight.unique().tolist() == [3.0], "init was not called instead"
    assert torch.equal(own.linear.bias, one.linear.bias), "init set the rest"


class Other(nn.Module):
    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (ids + position_ids,)


def test_inputs_and_output_map_the_call() -> None:
    batch = make_batch(torch.zeros(2, 3, dtype=torch.long))
    expected = torch.arange(3).expand(2, -1)
    by_name, by_function = Other(), Other()
    set_call(by_name, {"position_ids": "positions"}, lambda result: result[0])
    set_call(by_function, lambda b: {"position_ids": b.positions[None]}, lambda result: result[0])
    for model in (by_name, by_function):
        assert torch.equal(call_model(model, batch), expected)


def test_inputs_that_do_not_exist_are_refused() -> None:
    for inputs, wrong in (
        ({"place_ids": "positions"}, "`place_ids`, which forward of Other does not take"),
        ({"position_ids": "places"}, "the field `places`, but besides its input a batch has "),
    ):
        model = Other()
        set_call(model, inputs)
        with pytest.raises(TitanliteError, match=wrong):
            check_forward(model, ["targets", "positions"])


def test_a_loss_is_chosen_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict({"training": {"loss": "own"}})
    assert caught.value.problems == (
        'training.loss: no loss "own" is registered; give "weighted_cross_entropy", '
        '"squared_error" or "contrastive", or set '
        "experimental.custom_import to a module that calls titanlite.register_loss",
    )
    register_loss("own", "titanlite.training.loss:next_token_loss")
    assert JobConfig.from_dict({"training": {"loss": "own"}}).training.loss == "own"
    with pytest.raises(ValueError, match="already registered"):
        register_loss("own", "another:function")
    assert load_loss(LOSSES["own"]).total.__name__ == "next_token_loss"


def test_an_error_in_the_initial_values_is_reported_as_it_is(vit: Path) -> None:
    model = vit / "vit.py"
    text = model.read_text().replace("torch.randn(1, 1, dim) * 0.02", "fail()")
    model.write_text(
        text
        + "\n\ndef fail():\n"
        + "    if torch.get_default_device().type == 'cpu':\n"
        + "        raise ZeroDivisionError('no such noise')\n"
        + "    return torch.empty(1, 1, 64)\n"
    )
    option = "--parallelism.data_parallel_shard_degree=2"
    start = check_start(parse_args([f"--job.config_file={vit / 'vit.toml'}", option]))
    with pytest.raises(
        ConfigError, match=r"vit fails with ZeroDivisionError: no such noise \(vit.py"
    ):
        spawn(build_on_rank, 2, start.job, timeout_seconds=100)


def build_on_rank(place: Place, resolved: ResolvedJob) -> None:
    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        build_job(resolved, world)
