"""The end of a run: the loss curve, the load of experts, and samples beside real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.observe.metrics import FILE_NAME, read_metrics
from titanlite.observe.reporter import CURVE, LOADS
from titanlite.tools.sample.generate import NoSamplesError, sample_sequences, save_samples

# Tokens between two lines about sampling; a multiple of the interval of `on_tokens`.
SAMPLED_A_LINE = 768


def draw_end(
    job: Job, folder: Path, say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> None:
    """Draw the pictures of a run in `folder`; every rank must call this, and rank 0 draws.

    Sampling ends early once `is_stopped` returns True on a rank.
    """
    data, sampling = job.data, job.config.sampling
    if job.world.is_first:
        say(_draw_curve(job, folder))
    wanted, name = sampling.num_samples, data.sample_name
    if wanted == 0:
        return
    if not data.has_tokens:
        if "num_samples" in sampling.model_fields_set:
            say(f"nothing is sampled: {data.name} has no tokens")
        return
    seq_len = sampling.num_tokens or job.resolved.seq_len
    names = name if wanted == 1 else f"{name}s"
    say(f"sampling {wanted} {names}, {seq_len:,} {data.token_name}s each")

    def show(num_drawn: int) -> None:
        if num_drawn % SAMPLED_A_LINE == 0:
            say(f"  {data.token_name} {num_drawn:,} of {seq_len:,}")

    try:
        sequences = sample_sequences(job, wanted, on_tokens=show, is_stopped=is_stopped)
    except NoSamplesError as error:
        say(f"no {name}s sampled: {error}")
        return
    if not job.world.is_first:
        return
    if len(sequences) < wanted:
        why = "stopped as requested" if is_stopped() else "all would take over a minute"
        say(f"{len(sequences)} of {wanted} {name}s were drawn: {why}")
    if len(sequences):
        save_samples(job, sequences, folder / data.samples_file)
        say(f"sampled {name}s: {folder / data.samples_file}")


def _draw_curve(job: Job, folder: Path) -> str:
    """Draw the loss of all recorded steps, and the load of experts; returns what to print."""
    try:
        records = read_metrics(folder)
    except ConfigError as error:
        return f"no loss curve was drawn: {error}"
    if not records:
        return f"no loss curve was drawn: there are no records in {folder / FILE_NAME}"
    # matplotlib is slow to import: only on this rank, and only when needed.
    from titanlite.tools.gallery.pictures import save_expert_loads, save_loss_curve

    in_nats = job.data.is_in_nats and job.config.training.loss is None
    save_loss_curve(
        folder / CURVE,
        records,
        vocab_size=getattr(job.resolved.model, "vocab_size", None),
        title=job.config.job.description,
        bits_per=None if not in_nats else job.data.bits_name,
    )
    if job.trainer.balancer is None:
        return f"loss curve: {folder / CURVE}"
    save_expert_loads(folder / LOADS, records)
    return f"loss curve: {folder / CURVE}\nload of experts: {folder / LOADS}"
