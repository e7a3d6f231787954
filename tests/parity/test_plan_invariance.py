"""Every plan trains exactly as one process does: losses, norms, gradients and weights."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import FEW_STEPS, STEPS, Training, debug_config, difference, differences, train

from titanlite.config import parse_args
from titanlite.tools.verify.matrix import run_matrix
from titanlite.tools.verify.shrink import shrink
from titanlite.tools.verify.verify import Verifier

TOLERANCE = 1e-11
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
# Others have all that is in them.
SLOW = ("compile", "cp2_fsdp2", "cp2_tp2", "tp2_hsdp")


def assert_invariant(training: Training, reference: Training, tolerance: float) -> None:
    wrong = {
        what: error for what, error in differences(training, reference).items() if error > tolerance
    }
    assert not wrong
    assert len(set(training.digests)) == 1, "ranks see different whole weights"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as verifier:
        yield verifier


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem)
        for path in CONFIGS
    ],
)
def test_every_shipped_plan(verifier: Verifier, path: Path, steps: int):
    # Images are replaced, since their files may not be here; and without inductor's time.
    changes = ["--training.dataset=synthetic", "--training.dataset_path=none"]
    if {"pydoc", "chat"} & set(path.read_text().split('"')):
        changes = []
    config = parse_args([f"--job.config_file={path}", *changes, "--compile.backend=aot_eager"])
    small, _ = shrink(config)
    found = verifier.verify(small, steps=steps)
    assert found.agrees, found.findings
    assert found.margin > 50, f"{found.worst} is near the tolerance"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_pair_of_features(verifier: Verifier, tmp_path: Path):
    stream = io.StringIO()
    options = {"with_compile": True, "stream": stream, "verifier": verifier}
    assert run_matrix(num_ranks=4, folder=tmp_path, **options) == 0, stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "AdamW", "implementation": "fused"},
        {"name": "AdamW", "implementation": "foreach"},
        {"name": "Adam", "implementation": "for-loop"},
        # It hides no wrong scale.
        {"name": "SGD", "implementation": "foreach", "momentum": 0.9},
    ],
    ids=lambda optimizer: " ".join(map(str, optimizer.values())),
)
def test_rounding_does_not_grow_over_twenty_steps(optimizer: dict):
    """Under every optimizer, with grouped key and value heads, not clipped and clipped."""
    plan = {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        "training": {"local_batch_size": 4},
    }
    jobs = [
        {"optimizer": optimizer, "model": {"num_kv_heads": heads}, "training": {"max_norm": norm}}
        for heads, norm in ((8, 1.0), (4, float("inf")))
    ]
    references = train([debug_config(job) for job in jobs])
    trainings = train([debug_config(job, plan) for job in jobs])
    for training, reference in zip(trainings, references, strict=True):
        assert_invariant(training, reference, TOLERANCE)


def test_float32_agrees_over_ten_steps():
    single = {"training": {"dtype": "float32", "steps": 10}}
    plan = {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        "training": {"local_batch_size": 4},
    }
    (reference,) = train([debug_config(single)])
    (training,) = train([debug_config(single, plan)])
    assert_invariant(training, reference, 1e-4)


def batch_of(plan: dict[str, int]) -> dict[str, dict[str, int]]:
    """All images of a rank at once, as many as a pipeline's schedule needs."""
    replicas = plan.get("data_parallel_replicate_degree", 1)
    return {"training": {"local_batch_size": 2 if replicas == 4 else 4}}


PP2 = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    "plans",
    [
        [{"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}],
        pytest.param(
            [
                {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
                PP2 | {"data_parallel_shard_degree": 2},
                PP2 | {"context_parallel_degree": 2},
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mixed_precision_is_as_near_to_float32_as_one_process_is(plans: list[dict[str, int]]):
    """bfloat16 rounds differently under every plan; none may be further off than one process."""
    float32 = {"training": {"dtype": "float32", "steps": 3}}
    bfloat16 = {"training": {"dtype": "float32", "mixed_precision_param": "bfloat16", "steps": 3}}
    exact, own = train([debug_config(float32), debug_config(bfloat16)])
    own_error = max(difference(own.weights[name], exact.weights[name]) for name in exact.weights)
    assert own_error > 1e-6, "nothing was computed in bfloat16"
    jobs = [debug_config(bfloat16, {"parallelism": plan}, batch_of(plan)) for plan in plans]
    for training in train(jobs):
        error = max(difference(training.weights[n], exact.weights[n]) for n in exact.weights)
        assert 1e-6 < error < 1.5 * own_error
        for loss, reference in zip(training.losses, own.losses, strict=True):
            assert loss == pytest.approx(reference, rel=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan",
    [
        {"data_parallel_shard_degree": 4},
        {"data_parallel_replicate_degree": 4},
        {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_inductor(plan: dict, mode: str):
    compiled = {
        "compile": {"enable": True},
        "activation_checkpoint": {"mode": mode},
        "parallelism": plan,
    }
    (reference,) = train([debug_config()])
    # The second time the code is found on the disk.
    for _ in range(2):
        (training,) = train([debug_config(compiled)])
        assert_invariant(training, reference, TOLERANCE)
