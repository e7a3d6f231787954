"""A whole run on one process: what its keys promise, seen by its callbacks and in its files."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import titanlite
from titanlite.callbacks import Event, TrainResult
from titanlite.config.load import read_file
from titanlite.errors import NonFiniteError
from titanlite.observe.metrics import read_metrics

JOB: dict[str, dict[str, Any]] = {
    "model": {"flavor": "debug", "dim": 16, "num_layers": 1, "ffn_hidden_dim": 16},
    "training": {"dataset": "synthetic", "global_batch_size": 2, "local_batch_size": 2, "steps": 5},
    "parallelism": {"data_parallel_shard_degree": 1},
    "activation_checkpoint": {"mode": "none"},
    "sampling": {"num_samples": 0},
}


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Put back what a run may leave set in this process."""
    state = torch.get_rng_state()
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(algorithms, warn_only=warns)
    torch.set_rng_state(state)


def train(
    folder: Path, on_step: Callable[[Event], object] | None = None, **changes: Any
) -> TrainResult:
    """Train the job with `section__key=value` changed, and other callbacks as `on_...`."""
    job: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in JOB.items()}
    job["job"] = {"dump_folder": str(folder)}
    callbacks = {name: value for name, value in changes.items() if name.startswith("on_")}
    for name in changes.keys() - callbacks.keys():
        section, _, key = name.partition("__")
        job.setdefault(section, {})[key] = changes[name]
    return titanlite.train(job, on_step=on_step, **callbacks)


def test_garbage_is_collected_at_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    collected: list[int] = []
    is_automatic: list[bool] = []
    step = 0

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and step:
            collected.append(step + 1)

    def on_step(event: Event) -> None:
        nonlocal step
        step = 0 if event.step == 5 else event.step
        is_automatic.append(gc.isenabled())
        # More objects than Python allows before it collects by itself.
        assert len([[] for _ in range(5000)])

    assert gc.isenabled()
    gc.callbacks.append(note)
    try:
        train(tmp_path, on_step, training__gc_freq=2)
    finally:
        gc.callbacks.remove(note)
    # on_step is called after the collection of its step.
    assert collected == [2, 4]
    assert is_automatic == [False] * 5
    assert gc.isenabled()


@pytest.mark.parametrize("warns", [False, True])
def test_only_deterministic_algorithms_are_used(tmp_path: Path, warns: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    def on_step(event: Event) -> None:
        enabled = torch.are_deterministic_algorithms_enabled()
        seen.append((enabled, torch.is_deterministic_algorithms_warn_only_enabled()))

    keys = {"debug__deterministic": True, "debug__deterministic_warn_only": warns}
    train(tmp_path, on_step, training__steps=1, **keys)
    assert seen == [(True, warns)]


def test_a_resumed_run_draws_the_random_numbers_that_come_next(tmp_path: Path) -> None:
    drawn: list[float] = []

    def on_step(event: Event) -> None:
        drawn.append(float(torch.rand(())))

    keys = {"checkpoint__enable": True, "checkpoint__last_save_model_only": False}
    straight = {**keys, "training__steps": 4, "checkpoint__interval": 2}
    train(tmp_path, on_step, **straight)
    train(tmp_path, on_step, **straight, checkpoint__load_step=2)
    # A checkpoint is saved after the callback of its step.
    assert len(set(drawn[:4])) == 4
    assert drawn[4:] == drawn[2:4]


def test_state_that_is_excluded_is_not_loaded(tmp_path: Path) -> None:
    seen: list[tuple[int, float, int, int]] = []

    def on_step(event: Event) -> None:
        assert event.result is not None
        trainer, sampler = event.job.trainer, event.job.sampler
        updates = {int(state["step"]) for state in trainer.optimizer.state.values()}
        seen.append((event.step, event.result.lr, sampler.state, *updates))

    keys = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_model_only": False,
        "training__steps": 3,
    }
    train(tmp_path, on_step, **keys)
    straight, seen[:] = list(seen), []
    for excluded in ("lr_scheduler", "dataloader", "optimizer", "train_state"):
        train(
            tmp_path,
            lambda event: on_step(event) if event.step in (1, 3) else None,
            **keys,
            checkpoint__load_step=2,
            checkpoint__exclude_from_loading=[excluded],
        )
    first, last = straight[0], straight[2]
    assert first[1] != last[1]
    assert seen[0] == (last[0], first[1], *last[2:])
    assert seen[1] == (*last[:2], first[2], last[3])
    assert seen[2] == (*last[:3], first[3])
    # The run begins with step 1, but goes on with everything else.
    assert seen[3] == (first[0], *last[1:])


def test_the_whole_configuration_is_written(tmp_path: Path) -> None:
    train(tmp_path, training__steps=1, job__save_config_file="own/job.toml")
    again = titanlite.JobConfig.from_dict(read_file(str(tmp_path / "own/job.toml")))
    assert again.training.steps == 1
    assert again.optimizer.model_dump() == titanlite.JobConfig.from_dict(JOB).optimizer.model_dump()


def test_the_first_checkpoint_is_that_of_the_first_step(tmp_path: Path) -> None:
    for enable, steps in ((True, [1, 2]), (False, [2])):
        folder = tmp_path / str(enable)
        keys = {"checkpoint__enable": True, "checkpoint__enable_first_step_checkpoint": enable}
        train(folder, training__steps=2, checkpoint__interval=100, **keys)
        saved = sorted((folder / "checkpoint").iterdir())
        assert [path.name for path in saved] == [f"step-{step}" for step in steps]


def test_a_pipeline_of_two_ranks(tmp_path: Path) -> None:
    """Its timeouts, the memory of the largest rank, and when its timeline is drawn."""

    def on_step(event: Event) -> None:
        rank, watch = event.job.world.rank, event.job.world.watch
        assert watch is not None
        (tmp_path / f"timeout-{event.step}-{rank}").write_text(f"{watch.timeout_seconds:g}")
        if rank == 1 and event.step == 2:
            torch.ones(1 << 26)  # 256 MiB

    train(
        tmp_path,
        on_step,
        training__steps=3,
        parallelism__pipeline_parallel_degree=2,
        profiling__enable_pipeline_timeline=True,
        profiling__profile_freq=2,
        comm__init_timeout_seconds=111,
        comm__train_timeout_seconds=77,
    )
    found = {path.name: path.read_text() for path in tmp_path.glob("timeout-*")}
    assert found == {f"timeout-{step}-{rank}": "77" for step in (1, 2, 3) for rank in (0, 1)}
    # Read at the first step, each log_freq-th and the last one.
    first, second, last = (record.memory_bytes for record in read_metrics(tmp_path))
    assert second == first < last - (200 << 20)
    drawn = sorted(path.name for path in (tmp_path / "profile_traces").iterdir())
    # The second step, by profile_freq, and the last one.
    assert drawn == [f"pipeline_step_{n}.{kind}" for n in (2, 3) for kind in ("json", "svg")]


def test_callbacks_get_what_is_newest(tmp_path: Path) -> None:
    seen: list[tuple[str, int, float | None, dict[str, float], str]] = []

    def note(name: str) -> Callable[[Event], None]:
        def callback(event: Event) -> None:
            saved = event.checkpoint.name if event.checkpoint else ""
            of_event = event.validation_loss, dict(event.metrics), saved
            seen.append((name, event.step, *of_event))

        return callback

    result = train(
        tmp_path,
        note("step"),
        on_validation=note("validation"),
        on_checkpoint=note("checkpoint"),
        on_end=note("end"),
        training__steps=3,
        validation__enable=True,
        validation__freq=2,
        validation__steps=1,
        validation__local_batch_size=2,
        validation__metrics=["accuracy"],
        checkpoint__enable=True,
        checkpoint__interval=2,
        checkpoint__last_save_model_only=False,
    )
    second = result.validation_losses[2], result.metrics[2]
    last = result.validation_losses[3], result.metrics[3]
    assert list(second[1]) == ["accuracy"]
    assert seen == [
        ("step", 1, None, {}, ""),
        ("step", 2, None, {}, ""),
        ("validation", 2, *second, ""),
        ("checkpoint", 2, *second, "step-2"),
        ("step", 3, *second, "step-2"),
        ("validation", 3, *last, "step-2"),
        ("checkpoint", 3, *last, "step-3"),
        ("end", 3, *last, "step-3"),
    ]


@pytest.mark.parametrize("spoiled_at", [2, 3])
def test_a_checkpoint_whose_first_step_is_not_finite_is_named(
    tmp_path: Path, spoiled_at: int
) -> None:
    def spoil(event: Event) -> None:
        if event.step == spoiled_at:
            for parameter in event.job.parameters.values():
                parameter.data.fill_(torch.nan)

    keys = {
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "checkpoint__last_save_model_only": False,
        "lr_scheduler__total_steps": 4,
    }
    train(tmp_path, spoil, training__steps=2, **keys)
    with pytest.raises(NonFiniteError) as raised:
        train(tmp_path, spoil, training__steps=4, **keys)
    step_2 = tmp_path / "checkpoint" / "step-2"
    advice = (
        f"this is the first step from {step_2}, whose weights may be bad: move it away, or give "
        "another checkpoint"
    )
    assert str(raised.value).startswith(f"step {spoiled_at + 1}: loss nan, ")
    # A later step says nothing about the checkpoint.
    assert str(raised.value).endswith(f"; {advice}") == (spoiled_at == 2)


def test_callbacks_stop_all_ranks_and_keep_state(tmp_path: Path) -> None:
    job: dict[str, dict[str, Any]] = {
        **JOB,
        "job": {"dump_folder": str(tmp_path)},
        "parallelism": {"data_parallel_shard_degree": 2},
        "training": {**JOB["training"], "local_batch_size": 1},
        "checkpoint": {"enable": True, "interval": 100},
    }

    def on_step(event: Event) -> None:
        event.state["best"] = [event.step, event.job.world.rank]
        if event.step == 2 and event.job.world.rank == 1:
            event.stop()

    def on_start(event: Event) -> None:
        name = f"start-{event.step}-{event.job.world.rank}"
        (tmp_path / name).write_text(f"{event.state.get('best')}")

    first = titanlite.train(job, threads=True, on_step=on_step, on_start=on_start)
    assert (first.steps, first.is_stopped) == ([1, 2], True)
    assert (tmp_path / "checkpoint" / "step-2").is_dir()
    second = titanlite.train(job, threads=True, on_start=on_start)
    assert (second.steps, second.is_stopped) == ([3, 4, 5], False)
    # Rank 0's state is that of the checkpoint.
    started = {path.name: path.read_text() for path in tmp_path.glob("start-*")}
    new = {"start-0-0": "None", "start-0-1": "None"}
    assert started == {**new, "start-2-0": "[2, 0]", "start-2-1": "[2, 0]"}
    job["job"] = {"dump_folder": str(tmp_path / "other")}
    with pytest.raises(titanlite.TitanliteError, match="cannot be saved as JSON"):
        titanlite.train(job, threads=True, on_step=lambda e: (e.state.update(x=e), e.stop()))
