"""Killed at any moment, a run ends as the one that was never killed; disks fill, files change."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from faults import Fault, draw_fault, train_with
from plans import config_of
from torch import Tensor

from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.manifest import MANIFEST
from titanlite.checkpoint.storage import Piece, load, stored_tensors
from titanlite.config import JobConfig, make_parallel_dims, override, resolve_job
from titanlite.errors import ConfigError, RankError
from titanlite.observe.metrics import read_metrics
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.convert.stored import find_checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEPS, INTERVAL = 7, 2
FAULTS_AT_ONCE = 3


def config(folder: Path, *, plan: str = "two", mode: str = "disabled", **keys: object) -> JobConfig:
    """A short run that saves every second step, and keeps two."""
    whole = config_of(
        "single" if plan == "two" else plan,
        folder,
        interval=INTERVAL,
        keep_latest_k=2,
        async_mode=mode,
        last_save_model_only=False,
    )
    two = {"parallelism.data_parallel_shard_degree": 2} if plan == "two" else {}
    changes = {"training.steps": STEPS, "sampling.num_samples": 0, **two, **keys}
    return override(whole, changes)


def run(config: JobConfig, fault: Fault | None = None) -> None:
    spawn(train_with, make_parallel_dims(config, None).world_size, config, fault)


def final_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint, which is that of the last step."""
    path, manifest = find_checkpoint(folder / "checkpoint")
    assert manifest.step == STEPS
    state = {name: torch.zeros(shape, dtype=d) for name, (shape, d) in stored_tensors(path).items()}
    load({name: Piece.whole(tensor) for name, tensor in state.items()}, path, None)
    return state


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_metrics(folder)]


def assert_same(folder: Path, reference: Path) -> None:
    assert losses(folder) == losses(reference)
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    state, expected = final_state(folder), final_state(reference)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    # Of the killed run nothing is left.
    names = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert names == sorted(f"step-{step}" for step in (STEPS - 1, STEPS))


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    """The folder of the run of a plan that nobody killed."""
    folders: dict[str, Path] = {}

    def make(plan: str) -> Path:
        if plan not in folders:
            folders[plan] = tmp_path_factory.mktemp(f"reference-{plan}")
            run(config(folders[plan], plan=plan))
        return folders[plan]

    return make


@pytest.fixture(scope="module")
def never_killed(reference_of):
    return reference_of("two")


def survive(
    random_: random.Random, folder: Path, reference: Path, plan: str, kills: str = "one or all"
) -> bool:
    """Kill a run at a moment of its own, and start it again until it ends; whether it was killed.

    It was not where its end came first.
    """
    mode = random_.choice(["disabled", "async", "async_with_pinned_mem"])
    job = config(folder, plan=plan, mode=mode)
    num_ranks = make_parallel_dims(job, None).world_size
    fault = draw_fault(random_, num_ranks, asynchronous=mode != "disabled", kills=kills)
    print(plan, mode, fault)
    was_killed = False
    try:
        run(job, fault)
    except RankError as error:
        assert "SIGKILL" in str(error), error.rank_traceback  # noqa: PT017
        was_killed = True
        run(job)
    assert_same(folder, reference)
    return was_killed


def seed_of_today() -> int:
    return int(os.environ.get("FAULT_SEED") or time.time_ns() % 10**6)


def drawn(offset: int = 0) -> random.Random:
    seed = seed_of_today() + offset
    print(f"seed {seed}")
    return random.Random(seed)


def test_a_run_killed_anywhere_ends_as_the_one_never_killed(tmp_path, never_killed):
    random_ = drawn()
    for number in range(FAULTS_AT_ONCE):
        survive(random_, tmp_path / str(number), never_killed, "two")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_fifty_runs_killed_anywhere(tmp_path, never_killed, part):
    random_ = drawn(part)
    for number in range(8):
        survive(random_, tmp_path / str(number), never_killed, "two")


def survive_for_sure(
    random_: random.Random, folder: Path, reference: Path, plan: str, kills: str
) -> None:
    """The same, drawn again until the run was killed before its end."""
    for number in range(8):
        if survive(random_, folder / str(number), reference, plan, kills):
            return
    pytest.fail("the run was never killed")


@pytest.mark.slow
def test_a_killed_run_of_another_plan(tmp_path, reference_of):
    random_ = drawn()
    plan, kills = random_.choice(["tp2", "pp2", "cp2"]), random_.choice(["one", "all"])
    survive_for_sure(random_, tmp_path, reference_of(plan), plan, kills)


@pytest.mark.slow
@pytest.mark.parametrize("kills", ["one", "all"])
@pytest.mark.parametrize(
    "plan", ["tp2", "pp2", "cp2", "ddp4", "hsdp2x2", "tp2_fsdp2", "pp2_fsdp2", "offload"]
)
def test_killed_runs_of_every_plan(tmp_path, reference_of, plan, kills):
    random_ = drawn(len(plan))
    for number in range(2):
        survive_for_sure(random_, tmp_path / str(number), reference_of(plan), plan, kills)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mode"),
    [("two", "disabled"), ("two", "async"), ("tp2", "async"), ("pp2_fsdp2", "disabled")],
)
def test_a_killed_launcher_takes_its_ranks_along_and_nothing_is_lost(
    tmp_path, reference_of, plan, mode
):
    random_, never_killed = drawn(), reference_of(plan)
    words = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in flat(config(tmp_path / "out", plan=plan, mode=mode))
    ]
    (meeting := tmp_path / "meeting").mkdir()
    for _ in range(4):
        left = random_.randint(1, STEPS + 3)
        with subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(meeting)},
        ) as process:
            assert process.stdout is not None
            # Its end is that of the ranks, which hold it too.
            for line in process.stdout:
                left -= line.startswith(("step", "checkpoint"))
                if left == 0:
                    process.send_signal(signal.SIGKILL)
        assert not list(meeting.glob("titanlite-*"))
    run(config(tmp_path / "out", plan=plan, mode=mode))
    assert_same(tmp_path / "out", never_killed)


def flat(config: JobConfig) -> list[tuple[str, object]]:
    values = config.model_dump(exclude_unset=True)
    return [(f"{s}.{k}", v) for s, keys in values.items() for k, v in keys.items()]


def resumes_at(place: Place, config: JobConfig, changes: list) -> list[tuple[int, list[str]]]:
    """After each change of a file: the step to go on with, and what is said. Then it is undone."""
    from plans import make_job

    from titanlite.checkpoint.run import Checkpoints
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world:
        job = make_job(config, world)
        for path, content in changes:
            whole = path.read_bytes()
            torch.distributed.barrier()
            if world.is_first:
                path.unlink()
                if content is not None:
                    path.write_bytes(content)
            torch.distributed.barrier()
            with Checkpoints(job) as checkpoints:
                found.append((checkpoints.first_step, checkpoints.notes))
            torch.distributed.barrier()
            if world.is_first:
                path.write_bytes(whole)
            torch.distributed.barrier()
    return found


def test_a_changed_or_missing_file_is_named_and_the_one_before_is_taken(tmp_path, never_killed):
    newest = never_killed / "checkpoint" / f"step-{STEPS}"
    another = tmp_path / "another" / "checkpoint" / f"step-{STEPS}"
    run(config(tmp_path / "another", plan="single", **{"model.ffn_hidden_dim": 96}))
    changes: list[tuple[Path, bytes | None]] = []
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        place = random.Random(path.name).randrange(len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        changes += [(path, flipped), (path, whole[: len(whole) // 2]), (path, None)]
    changes.append((newest / MANIFEST, (another / MANIFEST).read_bytes()))
    job = config(never_killed, **{"checkpoint.load_only": True})
    for (path, content), (step, notes) in zip(
        changes, spawn(resumes_at, 2, job, changes)[0], strict=True
    ):
        assert step == STEPS, f"{path}: {content}"
        refused, taken = notes
        assert refused.startswith(f"checkpoint: step-{STEPS} cannot be used: "), refused
        if content is None or len(content) < 1000 or path.name != MANIFEST:
            assert path.name in refused
        assert taken.startswith(f"checkpoint: resuming from step-{STEPS - 1} instead, saved with ")


def test_a_checkpoint_of_another_model_is_refused(tmp_path, never_killed):
    job = config(never_killed, **{"checkpoint.load_only": True, "model.ffn_hidden_dim": 96})
    with pytest.raises(ConfigError, match=r"is from another model: .* 32\] there"):
        run(job)


def test_where_no_checkpoint_is_good_nothing_starts(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoint")
    for step in (2, 4):
        folder.at(step).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be used \(step-4 cannot be"):
        run(config(tmp_path))


def fill_disk(place: Place, config: JobConfig, rank: int) -> None:
    """A run in which files of one rank cannot grow beyond some bytes."""
    from titanlite.run import train_on_rank as train

    if place.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    train(place, resolve_job(config, place.world_size), "cpu")


@pytest.mark.parametrize(
    ("rank", "mode"), [(1, "async"), pytest.param(0, "disabled", marks=pytest.mark.slow)]
)
def test_a_full_disk_is_one_line_and_what_was_saved_stays(tmp_path, rank, mode):
    first = config(tmp_path, **{"training.steps": 2, "lr_scheduler.total_steps": STEPS})
    run(first)
    job = config(tmp_path, mode=mode, **{"lr_scheduler.total_steps": STEPS})
    with pytest.raises(ConfigError) as raised:
        spawn(fill_disk, 2, job, rank)
    line = str(raised.value)
    assert f"step-4 failed on rank {rank}: File too large" in line
    assert line.startswith("checkpoint.folder: saving ")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-2"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint of the short run and half of another."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_too_small_for_two_keeps_the_first(small_disk):
    with pytest.raises(ConfigError, match=r"step-4 failed on rank \d: No space left on device"):
        run(config(small_disk))
    assert [path.name for path in (small_disk / "checkpoint").iterdir()] == ["step-2"]
    assert find_checkpoint(small_disk / "checkpoint")[1].step == 2


def test_a_folder_that_cannot_be_written_is_known_before_training(tmp_path):
    (tmp_path / "checkpoint").write_text("in the way")
    with pytest.raises(ConfigError, match=r"checkpoint\.folder: .* cannot be written: File exists"):
        run(config(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()
