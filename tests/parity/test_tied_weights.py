"""A model with tied weights trains as one process does, under every plan."""

import math
from typing import Any

import pytest
from plans import checksum
from training import (
    DEBUG_JOB,
    FEW_STEPS,
    PP,
    REPLICATE,
    SHARD,
    TP,
    JobConfig,
    Sections,
    Training,
    differences,
    merged,
    train,
)

from tests.benchmarks.communication import count_step, totals
from titanlite.config import resolve_job
from titanlite.errors import ConfigError
from titanlite.modules.shards import whole_tensor
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.verify.verify import Verifier

TOLERANCE = 1e-11
JOB: Sections = {
    "experimental": {"custom_import": "tied_model"},
    "training": {"local_batch_size": 4},
}


def pp(schedule: str, **more: Any) -> dict[str, Any]:
    return PP | {"pipeline_parallel_schedule": schedule} | more


def config(plan: dict[str, Any], model: str = "tied") -> Any:
    """The job of a plan: keys of [parallelism], or whole sections."""
    is_sections = all(isinstance(value, dict) for value in plan.values())
    sections = merged(DEBUG_JOB, JOB, plan if is_sections else {"parallelism": plan})
    sections["model"] = {"name": model, "flavor": "small"}
    sections["training"]["steps"] = FEW_STEPS
    return JobConfig.from_dict(sections)


def with_whole_batch(parallelism: dict[str, Any]) -> dict[str, Any]:
    return {"parallelism": parallelism, "training": {"local_batch_size": 8}}


ON_TWO_RANKS: dict[str, Any] = {
    "TP": TP,
    "FSDP": SHARD,
    "PP": with_whole_batch(PP),
    "PP in a V, accumulation": pp("ZBVZeroBubble", pipeline_parallel_microbatch_size=1),
}
ON_FOUR_RANKS: dict[str, Any] = {
    "PP and TP": with_whole_batch(PP | TP),
    "PP and FSDP": PP | SHARD,
    "TP and FSDP": TP | SHARD,
}
WITH_SEQUENCE_PARALLEL: dict[str, Any] = {
    "TP and FSDP": TP | SHARD,
    "PP and TP": with_whole_batch(PP | TP),
}
ON_EIGHT_RANKS: dict[str, Any] = {
    "PP and HSDP, accumulation": {
        "parallelism": PP | REPLICATE | SHARD,
        "training": {"local_batch_size": 2},
    },
    "PP, TP and FSDP": PP | TP | SHARD,
    "PP in a V, TP and FSDP": pp("ZBVZeroBubble") | TP | SHARD,
}


GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "on four ranks": ("tied", ON_FOUR_RANKS),
    "sequence parallel": ("tied_sp", WITH_SEQUENCE_PARALLEL),
    "on eight ranks": ("tied", ON_EIGHT_RANKS),
}


@pytest.fixture(scope="module")
def reference() -> Training:
    return train([config({})])[0]


def assert_equal(plans: dict[str, Any], reference: Training, model: str = "tied") -> None:
    trainings = train([config(plan, model) for plan in plans.values()])
    for name, training in zip(plans, trainings, strict=True):
        found = differences(training, reference)
        wrong = {what: error for what, error in found.items() if error > TOLERANCE}
        assert wrong == {}, name
        assert len(set(training.digests)) == 1, f"{name}: ranks see different whole weights"


def test_on_two_ranks(reference: Training) -> None:
    assert "tok_emb.weight" in reference.weights
    assert "output.weight" not in reference.weights
    assert_equal(ON_TWO_RANKS, reference)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_other_plans(reference: Training, group: str) -> None:
    model, plans = GROUPS[group]
    assert_equal(plans, reference, model)


COUNTED: dict[str, Any] = {
    "FSDP": {"parallelism": SHARD},
    "FSDP, always": {"parallelism": SHARD | {"fsdp_reshard_after_forward": "always"}},
    "FSDP, never": {"parallelism": SHARD | {"fsdp_reshard_after_forward": "never"}},
    "PP": with_whole_batch(PP),
    "PP in a V": with_whole_batch(pp("ZBVZeroBubble")),
}


def look(place: Place) -> list[Any]:
    """For each plan of COUNTED: its collectives, its copies of the weight, and a whole model's."""
    from titanlite.job import build_job
    from titanlite.ranks.world import open_world
    from titanlite.tools.sample.generate import whole_model

    found = []
    with open_world(place) as world:
        for plan in COUNTED.values():
            job_config = config(plan)
            counts = totals(count_step(job_config, world)[0])
            job = build_job(resolve_job(job_config, world.size), world)
            job.step()
            if job.pipeline is not None:
                job.pipeline.copies.update_followers()
            copies = [
                checksum(whole_tensor(parameter.detach()))
                for part in job.parts
                for name, parameter in part.named_parameters()
                if name in ("tok_emb.weight", "output.weight")
            ]
            model: Any = whole_model(job)
            assert model.output.weight is model.tok_emb.weight
            copies.append(checksum(model.output.weight))
            states = sum("step" in state for state in job.trainer.optimizer.state.values())
            found.append((counts, copies, states))
    return found


@pytest.fixture(scope="module")
def looked_at() -> list[dict[str, Any]]:
    of_ranks = spawn(look, 2, timeout_seconds=180)
    return [dict(zip(COUNTED, of_rank, strict=True)) for of_rank in of_ranks]


V, D, HIDDEN, KV, L, WORD = 17, 32, 64, 16, 4, 8
TABLE = [(V, D)]
BLOCK = [(D, D), (KV, D), (KV, D), (D, D), (HIDDEN, D), (D, HIDDEN), (D, 1), (D, 1)]


def padded(shapes: list[tuple[int, int]]) -> int:
    return sum(math.ceil(rows / 2) * 2 * columns for rows, columns in shapes)


@pytest.mark.parametrize(
    ("policy", "number"), [("", 2 * L), (", always", 2 * L + 2), (", never", L + 1)]
)
def test_fsdp_gathers_table_and_head_as_one_unit(looked_at, policy: str, number: int) -> None:
    """docs/design_parallel.md: L + 1 units, and the tied weight counts once."""
    outer, block = padded([*TABLE, (D, 1)]), padded(BLOCK)
    whole = outer + L * block
    again = {"": whole - outer - block, ", always": whole, ", never": 0}[policy]
    counts, _, _ = looked_at[0][f"FSDP{policy}"]
    assert counts["all_gather", "dp_shard"] == (number, WORD * (whole + again))
    assert counts["reduce_scatter", "dp_shard"] == (L + 1, WORD * whole)


@pytest.mark.parametrize(("plan", "messages"), [("PP", 1), ("PP in a V", 0)])
def test_stages_exchange_one_gradient_a_step(looked_at, plan: str, messages: int) -> None:
    """docs/pipeline_parallel.md: w V D bytes to the other stage and from it; none within a rank."""
    resolved = resolve_job(config(COUNTED[plan]), 2)
    assert resolved.pipeline is not None
    num_microbatches = 8 // resolved.pipeline.microbatch_size
    boundaries = 1 if plan != "PP in a V" else 2
    activations = boundaries * num_microbatches, boundaries * WORD * 8 * 64 * D
    expected = activations[0] + messages, activations[1] + messages * WORD * V * D
    for counts, _, _ in (of_rank[plan] for of_rank in looked_at):
        assert counts["send", "pp"] == counts["receive", "pp"] == expected
        assert counts["all_reduce", "world"] == (2, 32)


@pytest.mark.parametrize("plan", COUNTED)
def test_every_copy_holds_the_same_bits(looked_at, plan: str) -> None:
    copies = [copy for of_rank in looked_at for copy in of_rank[plan][1]]
    assert len(set(copies)) == 1
    # In a V both copies are on one rank, and the optimizer has a state for the first alone.
    num_states = sum(of_rank[plan][2] for of_rank in looked_at)
    whole = 8 * L + 2
    assert num_states == {"PP": whole + 1, "PP in a V": whole}.get(plan, 2 * whole)


def test_a_plan_that_places_them_apart_is_refused(verifier: Verifier) -> None:
    line = (
        "model.name: output.weight and tok_emb.weight of TiedModelPlacedApart are one parameter, "
        "but the tensor-parallel plan has the first sharded by rows (ColwiseParallel) and the "
        "second replicated (EmbeddingLocal); give both one placement, such as RowwiseParallel for "
        "the embedding table and ColwiseParallel for the output layer"
    )
    for plan in (TP, PP | TP):
        with pytest.raises(ConfigError) as caught:
            verifier.verify(config(plan, "tied_apart"), steps=1)
        assert str(caught.value) == line


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [PP | SHARD, pp("ZBVZeroBubble") | SHARD, TP | SHARD, pp("DualPipeV")],
    ids=["PP and FSDP", "PP in a V and FSDP", "TP and FSDP", "DualPipeV"],
)
def test_verify_agrees_and_checkpoints_load(verifier: Verifier, plan: dict[str, Any]) -> None:
    whole = with_whole_batch(plan) if "data_parallel_shard_degree" not in plan else plan
    found = verifier.verify(config(whole), steps=2, reloads=True)
    assert found.agrees, found.findings
