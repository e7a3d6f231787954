"""Losses whose valid tokens lie unevenly over the ranks, some of which have none."""

import pytest
from training import Training, debug_config, differences

from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import Place, spawn

BATCH = 8
PLANS: dict[str, dict] = {
    "cp4 contiguous": {"context_parallel_degree": 4, "context_parallel_load_balancer": "none"},
    "cp4 head-tail": {"context_parallel_degree": 4},
    "cp2 x tp2": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "fsdp4": {"data_parallel_shard_degree": 4},
    "ddp4": {"data_parallel_replicate_degree": 4},
    "tp4": {"tensor_parallel_degree": 4},
}


def train_masked(place: Place, configs: list[JobConfig]) -> list[Training]:
    """Two steps each, in which of 8 images only the last 3 count, and of those the last 13 places.

    The three are those of the last two of four data-parallel ranks; the places are those of the
    last of four ranks that hold contiguous parts of the sequence.
    """
    from titanlite.job import build_job
    from titanlite.modules.batch import IGNORE_INDEX
    from titanlite.ranks.world import open_world

    trainings = []
    with open_world(place) as world:
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            training = Training()
            for step in (1, 2):
                image = job.dims.data_rank(world.rank) * BATCH // job.dims.dp
                batches = []
                for batch in job.draw():
                    targets = batch.targets.clone()
                    targets[:, batch.positions < 50] = IGNORE_INDEX
                    targets[: max(0, 5 - image)] = IGNORE_INDEX
                    image += len(targets)
                    batches.append(batch.replace(targets=targets))
                gradients: dict[str, object] = {}

                def keep(gradients=gradients, job=job) -> None:
                    gradients.update({n: grad.clone() for n, grad in job.whole_gradients()})

                done = job.trainer.step(batches, on_gradients=keep)
                assert done.num_targets == 3 * 13
                training.gradients[step] = gradients
                training.losses.append(done.loss)
                training.norms.append(done.grad_norm)
            training.weights = {name: whole.clone() for name, whole in job.whole_parameters()}
            trainings.append(training)
    return trainings


JOBS = {name: debug_config({"parallelism": plan}) for name, plan in PLANS.items()}
JOBS["fsdp4 in two microbatches"] = debug_config(
    {"parallelism": PLANS["fsdp4"]}, {"training": {"local_batch_size": 1}}
)
SLOW = ("cp4 head-tail", "ddp4", "fsdp4", "tp4")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, Training]:
    """What the jobs of the tests that run did, and one process."""
    tests = [item for item in request.session.items if item.originalname == "test_uneven_masks"]
    names = sorted({test.callspec.params["plan"] for test in tests})
    results = spawn(train_masked, 4, [JOBS[name] for name in names], timeout_seconds=120)[0]
    reference = spawn(train_masked, 1, [debug_config()], timeout_seconds=120)[0]
    return dict(zip([*names, "reference"], results + reference, strict=True))


@pytest.mark.parametrize(
    "plan", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in JOBS]
)
def test_uneven_masks(trained: dict[str, Training], plan: str):
    found = differences(trained[plan], trained["reference"])
    assert max(found.values()) < 1e-11
