"""`titanlite sample CHECKPOINT`: sample from a checkpoint, on any number of ranks.

Images are written to a file. Text is printed, a single one token by token as it is sampled.
The configuration of the job comes from the checkpoint, except for the plan. It is untrusted: the
user must name any module to import or folder to open (convert/stored.py).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from titanlite.checkpoint.manifest import Manifest
from titanlite.config import JobConfig, ResolvedJob, make_model_config, override
from titanlite.config.data import own_length, spec_for
from titanlite.config.load import read_file
from titanlite.errors import ConfigError, RankError, TitanliteError
from titanlite.observe.terminal import tell
from titanlite.ranks.fork_server import prepare_environment
from titanlite.ranks.launch import Place
from titanlite.start import check_start, run_job
from titanlite.tools.convert.stored import ASKED, find_checkpoint, stored_sections
from titanlite.tools.options import CommandParser, positive

if TYPE_CHECKING:
    from torch import Tensor

# If the configuration in a checkpoint asks for more, the user must give --num-samples.
MOST_SAMPLES = 1024
# A model of this size is built quickly, so loading can then name the missing keys.
BUILT_AT_ONCE = 10_000_000


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = CommandParser(
        prog="titanlite sample", description="Sample from the model in a checkpoint."
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="step-N, a folder of them, or .safetensors")
    add("--out", type=Path, metavar="FILE", help="images: a PNG; text is printed without it")
    add("--prompt", metavar="TEXT", help="to continue; default: sampling.prompt")
    add("--num-samples", type=positive, metavar="N", help="default: sampling.num_samples")
    add("--num-tokens", type=int, metavar="N", help="text: of a sample, with the prompt")
    add("--temperature", type=float, metavar="X", help="default: sampling.temperature; 0: greedy")
    add("--top-k", type=int, metavar="N", help="of the N likeliest tokens; default: sampling.top_k")
    add("--top-p", type=float, metavar="X", help="default: sampling.top_p")
    add("--seed", type=int, metavar="N", help="default: debug.seed")
    add("--ranks", type=positive, default=1, metavar="N", help="number of processes; default: 1")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--experimental.custom_import", metavar="MODULE", help="module that registers the model")
    add("--training.dataset_path", metavar="FOLDER", help="folder of a data set on the disk")
    add("--model.hf_assets_path", metavar="FOLDER", help="folder of the text tokenizer")
    add("--model.path", metavar="FOLDER", help="folder with config.json, for the model hf")
    add("--job.config_file", metavar="FILE", help="TOML file that may set the previous four keys")
    asked = parser.parse_args(arguments)
    prepare_environment()
    source, manifest, stored = _open(asked.checkpoint)
    config = _for_sampling(stored, source, _stored_bytes(source, manifest), asked)
    if config.sampling.num_samples == 0:
        raise ConfigError("--num-samples: the job's own number is 0; give a number")
    start = check_start(config, key="--ranks")
    is_text = spec_for(config).end_token is not None
    if asked.out is None and not is_text:
        raise ConfigError("--out: is not given; give the file to write")
    on_rank = partial(draw, source=source, manifest=manifest, out=asked.out)
    tell(f"loading {source}")
    try:
        drawn = run_job(on_rank, start)
    except RankError as error:
        raise TitanliteError(f"{error.rank_traceback}\n{error}".strip()) from error
    name, wanted = spec_for(config).sample_name, config.sampling.num_samples
    if drawn < wanted:
        print(f"sampled only {drawn} of {wanted} {name}s: all would take over a minute")
    if asked.out is not None:
        print(f"{drawn} {name}{'s' * (drawn != 1)} from {source}: {asked.out}")
    return 0


def draw(
    place: Place,
    resolved: ResolvedJob,
    device_type: str,
    source: Path,
    manifest: Manifest | None,
    out: Path | None,
) -> int:
    """Load the weights, sample, and print or write, as one rank; returns the number of samples."""
    from titanlite.checkpoint.folder import look_at
    from titanlite.checkpoint.group import CheckpointGroup
    from titanlite.checkpoint.start import load_weights, problem_of
    from titanlite.checkpoint.storage import cause_line
    from titanlite.checkpoint.weights import load_safetensors
    from titanlite.job import build_job
    from titanlite.ranks.world import open_world
    from titanlite.tools.sample import generate

    config = resolved.config
    with open_world(place, device_type, describe_place=resolved.dims.describe_place) as world:
        job = build_job(resolved, world)
        ranks = CheckpointGroup(world, config.comm.checkpoint_timeout_seconds)
        with ranks.with_long_timeout():
            if manifest is None:
                load_safetensors(job, source, ranks)
            else:
                if problem := problem_of(look_at(source), ranks):
                    raise ConfigError(
                        f"{source} cannot be used: {problem}; give another checkpoint"
                    )
                load_weights(job, source, manifest, ranks)
        is_streamed = config.sampling.num_samples == 1 and world.is_first
        # A reader that has closed the output must not cost the file that is asked for.
        tolerated = [] if out is None else [BrokenPipeError]
        writer = None
        with contextlib.suppress(*tolerated):
            # Data sets of text have a tokenizer, if their tokens' text is known.
            tokenizer = getattr(job.data, "tokenizer", None) if is_streamed else None
            writer = tokenizer and generate.TextWriter(tokenizer, config.sampling.prompt)

        def show(new: Tensor) -> None:
            with contextlib.suppress(*tolerated):
                if writer is not None:
                    writer.add(int(new))

        try:
            sequences = generate.sample_sequences(job, config.sampling.num_samples, on_new=show)
        except generate.NoSamplesError as error:
            raise ConfigError(f"{source}: {error}") from error
        if world.is_first and out is not None:
            try:
                generate.save_samples(job, sequences, out)
            except OSError as error:
                raise ConfigError(f"--out: writing {out} failed: {cause_line(error)}") from error
        if writer is not None:
            writer.close()
        elif world.is_first:
            for number, text in enumerate(job.data.texts(sequences), start=1):
                print(f"--- sample {number} ---\n{text}\n")
        return len(sequences)


def _open(path: Path) -> tuple[Path, Manifest | None, dict[str, Any]]:
    """The path of the weights, the manifest (None for .safetensors), and the configuration."""
    if path.suffix == ".safetensors":
        from titanlite.tools.convert.command import read_config

        config = read_config(path)
        if config is None:
            raise ConfigError(f"{path} has no configuration of its model; give a checkpoint")
        return path, None, config
    found = find_checkpoint(path)
    if not found[1].config:
        raise ConfigError(f"{path} has no configuration of its model; give a checkpoint of a run")
    return found[0], found[1], found[1].config


def _stored_bytes(source: Path, manifest: Manifest | None) -> int:
    if manifest is not None:
        return manifest.size_bytes
    from titanlite.checkpoint.weights import files_of

    return sum(file.stat().st_size for file in files_of(source))


def _check_size(sections: dict[str, dict[str, Any]], source: Path, stored_bytes: int) -> None:
    """Raises ConfigError if the model is larger than the files, before it is built."""
    try:
        model = make_model_config(JobConfig.model_validate(sections))
    except (ValidationError, ConfigError):
        return  # JobConfig will raise it
    given = sections.get("training", {}).get("seq_len")
    lengths = (own_length(model) or (given if isinstance(given, int) else 0), "tokens")
    for number, what in ((getattr(model, "num_parameters", 0), "parameters"), lengths):
        if number > max(stored_bytes, BUILT_AT_ONCE):
            raise ConfigError(
                f"checkpoint: {source} has {stored_bytes:,} bytes, but its [model] has "
                f"{number:,} {what}; give another checkpoint"
            )


def _for_sampling(
    stored: dict[str, Any], source: Path, stored_bytes: int, asked: argparse.Namespace
) -> JobConfig:
    """The job's configuration with the plan for sampling: only FSDP2, over the given ranks."""
    given = {name: getattr(asked, name) for name in ASKED}
    if file := getattr(asked, "job.config_file"):
        values = read_file(file)
        for name in ASKED:
            section, key = name.split(".")
            own = values.get(section)
            given[name] = given[name] or (own.get(key) if isinstance(own, dict) else None)
    sections = stored_sections(stored, source, given)
    _check_size(sections, source, stored_bytes)
    # The job's batch size may not be divisible by this number of ranks.
    sections["training"]["local_batch_size"] = 1
    try:
        config = JobConfig.from_dict(
            {
                **sections,
                "parallelism": {"data_parallel_shard_degree": asked.ranks},
                "activation_checkpoint": {"mode": "none"},
            }
        )
    except ConfigError as error:
        lines = (f"{problem} (the configuration in {source})" for problem in error.problems)
        raise ConfigError(*lines) from error
    if asked.num_samples is None and config.sampling.num_samples > MOST_SAMPLES:
        raise ConfigError(
            f"--num-samples: {source} asks for {config.sampling.num_samples:,}; give a number"
        )
    sampling = ("num_samples", "prompt", "num_tokens", "temperature", "top_k", "top_p")
    changes = {f"sampling.{name}": getattr(asked, name) for name in sampling}
    changes |= {"job.device": asked.device, "debug.seed": asked.seed}
    if asked.prompt is not None and asked.num_samples is None:
        changes["sampling.num_samples"] = 1
    return override(config, {name: value for name, value in changes.items() if value is not None})
