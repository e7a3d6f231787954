"""A model with rotary positions trains as one process does: every stage is told which tokens."""

from typing import Any

import pytest
from training import (
    CP,
    DEBUG_JOB,
    FEW_STEPS,
    PP,
    TP,
    JobConfig,
    Sections,
    Training,
    differences,
    merged,
    train,
)

from titanlite.ranks.launch import Place, spawn

TOLERANCE = 1e-11
JOB: Sections = {
    "experimental": {"custom_import": "rotary_model"},
    "training": {"local_batch_size": 8, "steps": FEW_STEPS},
}
SPLIT = {"pipeline_parallel_schedule": "ZBVZeroBubble"}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {"PP": PP, "PP with a split backward": PP | SPLIT}
ON_FOUR_RANKS: dict[str, dict[str, Any]] = {"PP and CP": PP | CP, "PP and TP": PP | TP}
MORE_ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "PP and CP, striped, a split backward": PP
    | CP
    | SPLIT
    | {"context_parallel_load_balancer": "striped"},
    "CP and TP": CP | TP,
}


def config(name: str, plan: dict[str, Any]) -> Any:
    sections = merged(DEBUG_JOB, JOB, {"parallelism": plan})
    sections["model"] = {"name": name, "flavor": "small"}
    return JobConfig.from_dict(sections)


@pytest.fixture(scope="module")
def reference() -> Training:
    return train([config("rotary", {})])[0]


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(ON_TWO_RANKS, id="two ranks"),
        pytest.param(ON_FOUR_RANKS, id="four ranks", marks=pytest.mark.slow),
        pytest.param(MORE_ON_FOUR_RANKS, id="more on four ranks", marks=pytest.mark.slow),
    ],
)
def test_every_stage_has_the_positions_of_its_tokens(reference, plans):
    jobs = {(name, "rotary"): config("rotary", plan) for name, plan in plans.items()}
    jobs |= {  # sequence parallelism is tensor parallelism's
        (name, "rotary_sp"): config("rotary_sp", plan)
        for name, plan in plans.items()
        if "tensor_parallel_degree" in plan
    }
    for job, training in zip(jobs, train(list(jobs.values())), strict=True):
        for what, difference in differences(training, reference).items():
            assert difference < TOLERANCE, f"{job}: {what}: {difference:.1e}"


def step_with_positions_of_each_sequence(place: Place) -> tuple[Any, Any]:
    """Logits and gradients of a pipeline whose positions are [B, T], by hand."""
    import torch
    from rotary_model.config import RotaryConfig
    from rotary_model.model import RotaryModel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import cross_entropy

    from titanlite.modules.batch import make_batch
    from titanlite.parallelize import PipelineRunner, split_model
    from titanlite.ranks.world import open_world
    from titanlite.schedule import make_schedule

    names = RotaryConfig().module_names
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(17, (4, 16), generator=generator)
    targets = torch.randint(17, (4, 16), generator=generator)
    positions = torch.randint(50, (4, 16), generator=generator).sort(dim=1).values
    batch = make_batch(tokens, targets, positions)

    def loss_function(logits, batch):
        return cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")

    with open_world(place) as world:
        torch.manual_seed(0)
        whole = RotaryModel(RotaryConfig()).double()
        plain = [part.to("meta") for part in split_model(whole, [names[:3], names[3:]])]
        part = split_model(whole, [names[:3], names[3:]])[world.rank]
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        pipeline = PipelineRunner(
            make_schedule("1F1B", num_ranks=2, num_microbatches=4),
            {world.rank: part},
            plain,
            mesh,
            example=batch.rows(0, 1),
            dtype=torch.float64,
        )
        pipeline.step(batch, loss_function)
        logits = pipeline.forward(batch)
        expected = whole(tokens, positions)
        loss_function(expected, batch).backward()
        if logits is not None:
            torch.testing.assert_close(logits, expected.detach())
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)
        return len(list(part.parameters())), logits is not None


def test_positions_may_differ_from_sequence_to_sequence():
    counts = spawn(step_with_positions_of_each_sequence, 2, timeout_seconds=120)
    assert [has_logits for _, has_logits in counts] == [False, True]
    assert sum(count for count, _ in counts) == 3 + 4 * 8
