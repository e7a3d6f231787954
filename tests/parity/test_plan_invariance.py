"""Every plan trains exactly as one process does: losses, norms, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from training import (
    FEW_STEPS,
    STEPS,
    Training,
    debug_config,
    difference,
    differences,
    train,
)

from titanlite.config import JobConfig, parse_args
from titanlite.tools.verify.covering import Choice, cover_pairs, pairs
from titanlite.tools.verify.shrink import shrink
from titanlite.tools.verify.verify import Verifier

TOLERANCE = 1e-11
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

FEATURES: dict[str, list] = {
    # dp_replicate, dp_shard, cp, tp
    "degrees": [
        (1, 4, 1, 1),
        (4, 1, 1, 1),
        (2, 2, 1, 1),
        (1, 1, 1, 4),
        (1, 2, 1, 2),
        (2, 1, 1, 2),
        (1, 1, 4, 1),
        (1, 1, 2, 2),
        (1, 2, 2, 1),
        (2, 1, 2, 1),
    ],
    "layout": ["headtail", "striped", "none"],
    "rotation": ["alltoall", "allgather"],
    "checkpoint": ["none", "full", "2", "op"],
    "compile": [False, True],
    "reshard": ["default", "always", "never"],
    "offload": [False, True],
    "loss_parallel": [True, False],
    "async_tp": [False, True],
    "local_batch_size": [2, 1],
    "optimizer": ["AdamW fused", "AdamW foreach", "Adam for-loop", "SGD foreach"],
    "max_norm": [1.0, float("inf")],
    "num_kv_heads": [8, 4],
    "dropout": [0.0, 0.2],
}
# What is not a plan's business: the reference has these too.
OF_THE_JOB = ("optimizer", "max_norm", "num_kv_heads", "dropout")


def is_legal(choice: Choice) -> bool:
    """Settings that would have nothing to act on are left at their defaults."""
    _, shard, cp, tp = choice["degrees"]
    return (
        (shard * cp > 1 or (choice["reshard"] == "default" and not choice["offload"]))
        and (cp > 1 or (choice["layout"] == "headtail" and choice["rotation"] == "alltoall"))
        and (tp > 1 or (choice["loss_parallel"] and not choice["async_tp"]))
    )


def job_of(choice: Choice, steps: int, *, plan: bool = True) -> JobConfig:
    optimizer, implementation = choice["optimizer"].split()
    sections: dict[str, dict] = {
        "model": {"num_kv_heads": choice["num_kv_heads"], "dropout": choice["dropout"]},
        "training": {"max_norm": choice["max_norm"], "steps": steps},
        "optimizer": {
            "name": optimizer,
            "implementation": implementation,
            **({"momentum": 0.9} if optimizer == "SGD" else {}),
        },
    }
    if not plan:
        return debug_config(sections)
    replicate, shard, cp, tp = choice["degrees"]
    mode = choice["checkpoint"]
    selective = {"mode": "selective", "selective_ac_option": mode}
    return debug_config(
        sections,
        {
            "parallelism": {
                "data_parallel_replicate_degree": replicate,
                "data_parallel_shard_degree": shard,
                "context_parallel_degree": cp,
                "context_parallel_load_balancer": choice["layout"],
                "context_parallel_rotate_method": choice["rotation"],
                "tensor_parallel_degree": tp,
                "fsdp_reshard_after_forward": choice["reshard"],
                "disable_loss_parallel": not choice["loss_parallel"],
                "enable_async_tensor_parallel": choice["async_tp"],
            },
            "training": {
                "enable_cpu_offload": choice["offload"],
                "local_batch_size": choice["local_batch_size"],
            },
            "activation_checkpoint": {"mode": mode} if mode in ("none", "full") else selective,
            "compile": {"enable": choice["compile"], "backend": "aot_eager"},
        },
    )


ALL_PAIRS = cover_pairs(FEATURES, is_legal)


def name_of(choice: Choice) -> str:
    return ", ".join(f"{key} {value}" for key, value in choice.items())


class Trained:
    """Trainings of all choices, and of their references, in two launches."""

    def __init__(self, choices: list[Choice], steps: int) -> None:
        jobs = {self._key(choice): job_of(choice, steps, plan=False) for choice in choices}
        self._references = dict(zip(jobs, train(list(jobs.values())), strict=True))
        self._trained = train([job_of(choice, steps) for choice in choices])
        self._choices = choices

    def pair(self, choice: Choice) -> tuple[Training, Training]:
        return self._trained[self._choices.index(choice)], self._references[self._key(choice)]

    @staticmethod
    def _key(choice: Choice) -> tuple:
        return tuple(choice[name] for name in OF_THE_JOB)


def assert_invariant(training: Training, reference: Training, tolerance: float) -> None:
    wrong = {
        what: error for what, error in differences(training, reference).items() if error > tolerance
    }
    assert not wrong
    assert len(set(training.digests)) == 1, "ranks see different whole weights"


@pytest.fixture(scope="module")
def all_pairs() -> Trained:
    return Trained(ALL_PAIRS, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("choice", ALL_PAIRS, ids=name_of)
def test_every_pair_of_features(all_pairs: Trained, choice: Choice):
    assert_invariant(*all_pairs.pair(choice), TOLERANCE)


def test_the_covering_set_has_every_legal_pair():
    shown = set().union(*map(pairs, ALL_PAIRS))
    for pair in pairs(
        {"degrees": (1, 2, 1, 2), "checkpoint": "op", "compile": True, "offload": True}
    ):
        assert pair in shown
    assert (("degrees", (4, 1, 1, 1)), ("offload", True)) not in shown
    assert all(is_legal(choice) for choice in ALL_PAIRS)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as verifier:
        yield verifier


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_plan(verifier: Verifier, path: Path, steps: int):
    # Images are replaced, since their files may not be here; and without inductor's time.
    changes = ["--training.dataset=synthetic", "--training.dataset_path=none"]
    if "pydoc" in path.read_text():
        changes = []
    config = parse_args([f"--job.config_file={path}", *changes, "--compile.backend=aot_eager"])
    small, _ = shrink(config)
    found = verifier.verify(small, steps=steps)
    assert found.agrees, found.findings
    assert found.margin > 100, f"{found.worst} is near the tolerance"


@pytest.mark.slow
def test_rounding_does_not_grow_over_twenty_steps():
    """With AdamW; and with SGD, which hides no wrong scale, and grouped key and value heads."""
    plan = {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        "training": {"local_batch_size": 4},
    }
    optimizer = {"name": "SGD", "momentum": 0.9}
    sgd = {"optimizer": optimizer, "model": {"num_kv_heads": 4}}
    references = train([debug_config(), debug_config(sgd)])
    trainings = train([debug_config(plan), debug_config(sgd, plan)])
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


def test_mixed_precision_is_as_near_to_float32_as_one_process_is():
    """bfloat16 rounds differently under every plan; none may be further off than one process."""
    float32 = {"training": {"dtype": "float32", "steps": 3}}
    bfloat16 = {"training": {"dtype": "float32", "mixed_precision_param": "bfloat16", "steps": 3}}
    exact, own = train([debug_config(float32), debug_config(bfloat16)])
    own_error = max(difference(own.weights[name], exact.weights[name]) for name in exact.weights)
    assert own_error > 1e-6, "nothing was computed in bfloat16"
    plans = [
        {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1},
        {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2},
        {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
    ]
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
