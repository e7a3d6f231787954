"""Float8 under every plan is one process in float8; what FSDP2 sends of it is a byte a weight."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plans import checksums
from training import DEBUG_JOB, Sections, debug_config, merged

from tests.benchmarks.communication import Collective, count_plans, totals
from titanlite.checkpoint.run import Checkpoints
from titanlite.config import JobConfig, resolve_job
from titanlite.job import build_job
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.plan_row import PlanRow
from titanlite.ranks.launch import spawn
from titanlite.ranks.world import open_world
from titanlite.tools.verify.verify import Verifier

REPLICATE, SHARD = "data_parallel_replicate_degree", "data_parallel_shard_degree"
TP, CP, PP = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
GATHERED = {"enable_fsdp_float8_all_gather": True}
PRECOMPUTED = {**GATHERED, "precompute_float8_dynamic_scale_for_fsdp": True}
BY_OPERATOR: Sections = {
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}
}
COMPILED: Sections = {"compile": {"enable": True, "backend": "aot_eager"}}


def float8(recipe: str = "tensorwise", **keys: Any) -> Sections:
    """Every linear layer in float8, the output layer too, in two microbatches on each rank."""
    return {
        "model": {"converters": ["quantize.linear.float8"], "vocab_size": 32},
        "training": {"dataset": "synthetic"},
        "quantize": {"linear": {"float8": {"recipe_name": recipe, "emulate": True, **keys}}},
    }


def plan(local_batch_size: int, **degrees: Any) -> Sections:
    return {
        "training": {"local_batch_size": local_batch_size, "global_batch_size": 8},
        "parallelism": degrees,
    }


PLANS: dict[str, tuple[Sections, ...]] = {
    "fsdp2 gathered": (float8(**GATHERED), plan(2, **{SHARD: 2}), BY_OPERATOR),
    "tp2 rowwise": (float8("rowwise"), plan(4, **{TP: 2}), BY_OPERATOR),
    "pp2 gw_hp": (float8("rowwise_with_gw_hp"), plan(4, **{PP: 2})),
    "cp2": (float8(), plan(4, **{CP: 2})),
}
# Of pairs of features, `titanlite verify --matrix` has those of float8.
SLOW_PLANS: dict[str, tuple[Sections, ...]] = {
    "fsdp2 validation": (
        float8(),
        plan(4, **{SHARD: 2}),
        {"validation": {"enable": True, "local_batch_size": 3}},
    ),
    "fsdp2 inductor": (float8(**GATHERED), plan(4, **{SHARD: 2}), {"compile": {"enable": True}}),
}


@pytest.mark.parametrize(
    "name", [*PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PLANS)]
)
def test_a_plan_is_one_process_that_takes_the_same_microbatches(
    verifier: Verifier, name: str
) -> None:
    config = JobConfig.from_dict(merged(DEBUG_JOB, *(PLANS | SLOW_PLANS)[name]))
    found = verifier.verify(config, steps=3, reloads=True)
    assert found.agrees, found.findings
    assert found.margin > 100, found.worst


def test_pytorchs_own_styles_multiply_by_the_layers_product(verifier: Verifier) -> None:
    sections = merged(DEBUG_JOB, float8("rowwise"), plan(4, **{TP: 2}))
    sections["model"] = {
        "name": "plain",
        "flavor": "small",
        "converters": ["quantize.linear.float8"],
    }
    sections["training"]["dataset"] = "digits"
    sections["experimental"] = {"custom_import": "plain_model"}
    found = verifier.verify(JobConfig.from_dict(sections), steps=2)
    assert found.agrees, found.findings


@pytest.mark.slow
def test_in_float32_the_losses_agree(verifier: Verifier) -> None:
    config = JobConfig.from_dict(merged(DEBUG_JOB, float8(), plan(2, **{SHARD: 2})))
    found = verifier.verify(config, steps=5, dtype="float32")
    assert found.agrees, found.findings
    assert math.isinf(found.tolerance.of(1, ("gradient", "layers.0.attention.wq.weight")))
    assert found.tolerance.of(1, ("loss", "")) == 1e-4


MODEL = FLAVORS["debug"]
L, D, F, V = MODEL.num_layers, MODEL.dim, MODEL.ffn_hidden_dim, MODEL.vocab_size
LAYERS = 7  # of a block, each in float8
COUNTED = {"plain": {}, "float8": {}, "gathered": GATHERED, "precomputed": PRECOMPUTED}


def count_fsdp2() -> dict[str, Mapping[tuple[str, str], tuple[int, int]]]:
    """What two ranks of FSDP2 send in a step of one microbatch, in float32."""
    configs = []
    for name, keys in COUNTED.items():
        sections = merged(
            DEBUG_JOB,
            float8(**keys),
            plan(4, **{SHARD: 2}),
            {"training": {"dtype": "float32"}, "model": {"vocab_size": V}},
        )
        if name == "plain":
            sections["model"]["converters"] = []
        configs.append(JobConfig.from_dict(sections))
    counted: list[list[tuple[list[Collective], int]]] = spawn(
        count_plans, 2, configs, timeout_seconds=120
    )
    return {
        name: totals(collectives)
        for name, (collectives, _) in zip(COUNTED, counted[0], strict=True)
    }


def test_a_step_sends_what_the_note_says() -> None:
    """docs/float8.md: bytes of gathers, scales, and gradients as they were."""
    found = count_fsdp2()
    gathers, scatters, reductions = (
        ("all_gather", "dp_shard"),
        ("reduce_scatter", "dp_shard"),
        ("all_reduce", "dp_shard"),
    )
    weights = LAYERS * L
    elements = L * (4 * D * D + 3 * D * F)
    # The first block is gathered twice a step, the last one stays.
    gathered = elements + elements // L
    plain, cast, precomputed = found["plain"], found["gathered"], found["precomputed"]
    count, num_bytes = plain[gathers]
    assert cast[gathers] == (count, num_bytes - 4 * gathered + gathered)
    assert precomputed[gathers] == cast[gathers]
    assert cast[scatters] == precomputed[scatters] == plain[scatters]
    # Each product's input and output gradient; the amax of a joined one's gradients is one.
    of_products = weights + weights
    assert found["float8"][gathers] == plain[gathers]
    assert reductions not in plain
    assert found["float8"][reductions] == (of_products, 4 * of_products)
    # Of each weight, each time it is gathered; or once, of all.
    of_weights = weights + weights // L
    assert cast[reductions] == (of_products + of_weights, 4 * (of_products + of_weights))
    assert precomputed[reductions] == (of_products + 1, 4 * (of_products + weights))


def test_the_effective_plan_lists_the_layers_and_their_product() -> None:
    (row,) = spawn(_float8_row, 1, debug_config(float8("rowwise"), plan(4)))
    assert isinstance(row, PlanRow)
    assert (row.requested, row.active) == ("rowwise", "rowwise")
    assert row.note == (
        "15 of 15 linear layers: layers.*.attention.wq, layers.*.attention.wk, "
        "layers.*.attention.wv, layers.*.attention.wo, layers.*.feed_forward.w1, "
        "layers.*.feed_forward.w2, layers.*.feed_forward.w3, output; products emulated; "
        "scales over the 4 sequences of a microbatch on all ranks"
    )


def _float8_row(place: Any, config: Any) -> Any:
    with open_world(place) as world:
        job = build_job(resolve_job(config, world.size), world)
        return next(row for row in job.applied if row.feature == "float8")


def test_a_run_resumes_to_the_bit_and_goes_on_plain_and_back(tmp_path: Path) -> None:
    in_float8 = merged(float8(**PRECOMPUTED), plan(2, **{SHARD: 2}))
    plain = merged(in_float8, {"model": {"converters": []}})
    whole, resumed, switched = spawn(
        _train_in_parts,
        2,
        [
            [(in_float8, 4)],
            [(in_float8, 2), (in_float8, 4)],
            [(in_float8, 1), (plain, 2), (in_float8, 4)],
        ],
        str(tmp_path),
        timeout_seconds=200,
    )[0]
    assert resumed == whole
    assert switched.keys() == whole.keys()
    assert switched != whole


def _train_in_parts(place: Any, runs: list[Any], folder: str) -> list[dict[str, str]]:
    """For each run, jobs that go on from each other, each up to a step: the last one's state."""
    states = []
    with open_world(place) as world:
        for number, parts in enumerate(runs):
            for sections, last in parts:
                where: Sections = {
                    "job": {"dump_folder": f"{folder}/{number}"},
                    "checkpoint": {"enable": True},
                }
                config = debug_config(sections, where)
                job = build_job(resolve_job(config, world.size), world)
                with Checkpoints(job) as checkpoints:
                    for _ in range(checkpoints.first_step, last + 1):
                        job.step()
                    checkpoints.save(last)
            states.append(checksums(job))
    return states
