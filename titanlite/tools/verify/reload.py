"""On a rank: loads the checkpoint of a plan's job into a new job, and measures that.

save_and_load    on the plan's own ranks
resume_alone     on one process
"""

from pathlib import Path
from typing import Any

from titanlite.checkpoint.run import Checkpoints
from titanlite.config import ResolvedJob
from titanlite.job import Job, build_job
from titanlite.ranks.world import World
from titanlite.tools.verify.opened import open_job, subject_of
from titanlite.tools.verify.record import RankStep
from titanlite.tools.verify.step_files import load, wait_for


def save_and_load(job: Job, step: int, record: Any, problems: list[str]) -> RankStep:
    """Save the job, load it into a new one, and compare that with the `record` of `step`."""
    with Checkpoints(job) as checkpoints:
        checkpoints.save(step, in_background=True)
        schedule, position = _schedule_of(job), job.sampler.state
        if job.config.checkpoint.async_mode != "disabled":
            # Train on while the checkpoint is written: this must not change what is saved.
            job.trainer.step(job.draw())
    if job.world.is_first:
        _saved_file(job.resolved).touch()
    again = build_job(job.resolved, job.world)
    with Checkpoints(again) as checkpoints:
        if checkpoints.first_step != step + 1:
            problems.append(
                f"a run resumed from the checkpoint of step {step} continues at step "
                f"{checkpoints.first_step}, not {step + 1}"
            )
    if again.sampler.state != position:
        problems.append(
            f"a run resumed from the checkpoint reads sample {again.sampler.state} next, not "
            f"{position}"
        )
    after = _schedule_of(again)
    for what, value in schedule.items():
        if value != after[what]:
            problems.append(
                f"a run resumed from the checkpoint has {what} {after[what]}, not {value}"
            )
    return _loaded(again, record)


def resume_alone(world: World, resolved: ResolvedJob, step: int, folder: str) -> RankStep:
    """Load a plan's checkpoint on one process and compare it with the reference's `step`.

    Waits until the plan has saved it. If ranks store shards in each other's place, they load them
    back correctly; one process does not.
    """
    with open_job(world, resolved) as job:
        wait_for(_saved_file(resolved))
        with Checkpoints(job):
            pass
        return _loaded(job, load(folder, step))


def _loaded(job: Job, record: Any) -> RankStep:
    subject = subject_of(job)
    return RankStep(
        weights=subject.compare_weights(record["weights"]),
        state=subject.compare_state(record["state"]),
        buffers=subject.compare_buffers(record["buffers"], job.buffers),
    )


def _schedule_of(job: Job) -> dict[str, Any]:
    trainer = job.trainer
    state = subject_of(job).state()
    return {
        "the learning rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "the schedule's step": trainer.scheduler.last_epoch,
        "the dtypes of its state": sorted({str(tensor.dtype) for tensor in state.values()}),
    }


def _saved_file(resolved: ResolvedJob) -> Path:
    """The file that appears when the checkpoint of the job's last step is complete."""
    return Path(resolved.config.job.dump_folder) / "saved"
