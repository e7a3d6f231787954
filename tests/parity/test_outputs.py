"""What runs leave in one folder: two never write to one file, and nothing recorded is lost."""

import contextlib
import io
from pathlib import Path

from plans import config_of

from titanlite.config import JobConfig, override, resolve_job
from titanlite.errors import ConfigError
from titanlite.observe.metrics import FILE_NAME, MetricsLog, read_metrics
from titanlite.ranks.launch import Place, spawn


def config(folder: Path, steps: int, **keys: object) -> JobConfig:
    changes = {name.replace("__", "."): value for name, value in keys.items()}
    small = {"sampling.num_samples": 0, "lr_scheduler.total_steps": 9}
    whole = config_of("single", folder, interval=2, last_save_model_only=False)
    return override(whole, {"training.steps": steps, **small, **changes})


def say_what_happens(place: Place, runs: list[tuple[JobConfig, bool]]) -> list[str]:
    """What each run prints, or the line that refuses it; True: beside another run that records."""
    from titanlite.observe import metrics
    from titanlite.run import train_on_rank as train
    from titanlite.tools import gallery

    metrics.PATIENCE_SECONDS = 0
    printed = []
    for job, is_beside in runs:
        folder = Path(job.job.dump_folder)
        with (
            MetricsLog(folder) if is_beside else contextlib.nullcontext(),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            try:
                train(place, resolve_job(job, place.world_size), "cpu", None, gallery)
            except ConfigError as error:
                print(f"refused: {error}", file=out)
        printed.append(out.getvalue())
        if "forget" in job.job.description:
            (folder / FILE_NAME).unlink()
    return printed


def steps_of(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


def test_runs_in_one_folder(tmp_path):
    folder = tmp_path / "out"
    alone = {"checkpoint__enable": False}
    first, guest, beside, new, finished = spawn(
        say_what_happens,
        1,
        [
            (config(folder, 4, sampling__num_samples=1), False),
            (config(folder, 6, checkpoint__load_only=True), True),
            (config(folder, 2, **alone), True),
            (config(folder, 2, **alone, job__description="forget"), False),
            (config(folder, 4), False),
        ],
    )[0]
    assert "refused" not in first + guest + new + finished
    # One that only loads writes elsewhere, also while another one records.
    own = folder / "load_only-1"
    assert f"checkpoint: load_only: this run writes to {own}\n" in guest
    assert steps_of(own) == [5, 6]
    assert {path.name for path in own.iterdir()} == {FILE_NAME, "loss.png", "first_screen.txt"}
    assert f"refused: job.dump_folder: another run is writing to {folder}; end that" in beside
    # A new run keeps what the one before has left.
    kept = ["metrics.1.jsonl", "loss.1.png", "samples.1.png"]
    assert f"metrics: the records of an earlier run are kept in {', '.join(kept)}\n" in new
    assert steps_of(folder / kept[0]) == [1, 2, 3, 4]
    # A finished run is started again, and its records are gone.
    assert f"no loss curve was drawn: there are no records in {folder / FILE_NAME}\n" in finished
    left = {path.name for path in folder.iterdir() if path.is_file()}
    assert left == {*kept, FILE_NAME, "loss.png", "first_screen.txt"}
    assert steps_of(folder) == []
