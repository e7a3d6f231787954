"""Sample sequences from the model of a job: autoregressively, with a key/value cache.

The weights are gathered into the plain model on every rank, under any plan, and the sequences are
divided among the ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.batch import call_model, make_batch, takes
from titanlite.config import load_model_spec
from titanlite.data.sampler import first_tokens
from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.models.build import build_model, initial_model
from titanlite.names import canonical_name
from titanlite.parallelize import DTYPES
from titanlite.ranks.world import free_memory_bytes
from titanlite.tied import find_tied, tie
from titanlite.training.initialize import (
    draws_by_name,
    generator_for,
    has_buffers,
    init_buffers,
)
from titanlite.training.shards import whole_tensor

# The most tokens in one batch of sequences, which bounds the key/value cache.
TOKENS_AT_ONCE = 16 * 3072
# Tokens between two time checks.
TOKENS_A_LOOK = 128
# Time checks needed to estimate the growth of the cost per token.
LOOKS_FOR_A_LINE = 4
WAIT_SECONDS = 3600


def sample_sequences(
    job: Job,
    num_samples: int,
    *,
    temperature: float = 1.0,
    limit_seconds: float = 60,
    on_tokens: Callable[[int], None] = lambda num_drawn: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Up to `num_samples` sampled sequences as tokens [N, T]; every rank must call this.

    Each starts with the first tokens of a training sample, as many as the data set defines; the
    other tokens are sampled from the model's logits divided by `temperature`. The sequences are the
    same for every plan with the same weights, up to rounding error. If all would take longer than
    `limit_seconds`, a rank drops as many as necessary, but keeps at least one. `on_tokens` is
    called regularly with the number of tokens sampled so far per sequence. If `is_stopped` becomes
    true, a rank drops its unfinished sequences. Raises NoSamplesError if the whole model does not
    fit in memory beside the shards, or needs batch fields other than tokens and positions.
    """
    if not job.data.has_tokens:
        raise NoSamplesError(f"the samples of {job.data.name} are not tokens")
    for name in job.data.fields:
        if name not in ("targets", "positions") and _is_taken(job, name):
            raise NoSamplesError(f"the model takes `{name}`, which sampling cannot provide")
    if not _fits(job):
        raise NoSamplesError("the whole model does not fit on one rank")
    # A rank that samples nothing, or is faster, waits for the others at the end.
    job.world.set_timeout(WAIT_SECONDS, "the limit of sampling")
    model, seq_len = whole_model(job), job.resolved.seq_len
    # Each row is a sequence and a flag that it is complete; zero on all ranks except its own.
    sequences = torch.zeros(num_samples, seq_len + 1, dtype=torch.long)
    left = list(range(job.world.rank, num_samples, job.world.size))
    at_once = max(1, TOKENS_AT_ONCE // seq_len)
    pace = Pace(limit_seconds)

    def look(num_drawn: int) -> None:
        on_tokens(num_drawn)
        if is_stopped():
            raise _StoppedError

    while left and pace.allows_another() and not is_stopped():
        drawn, left = left[:at_once], left[at_once:]
        prompts = first_tokens(job.dataset, drawn, job.data.prompt_length)
        generators = [generator_for(job.config.debug.seed, f"sample {index}") for index in drawn]
        try:
            tokens = generate(
                model,
                prompts.to(job.world.device),
                seq_len,
                generators,
                temperature,
                pace=pace,
                on_tokens=look,
            )
        except _StoppedError:
            break
        sequences[drawn[: len(tokens)], :-1] = tokens.cpu()
        sequences[drawn[: len(tokens)], -1] = 1
    sequences = sequences.to(job.world.device)
    dist.all_reduce(sequences)
    return sequences[sequences[:, -1] == 1, :-1].cpu()


class NoSamplesError(TitanliteError):
    """Sampling is not possible for this model; raised on every rank."""


class _StoppedError(Exception):
    """Raised at a time check, to drop unfinished sequences."""


def save_samples(job: Job, sequences: Tensor, path: Path) -> None:
    """Write sampled sequences and as many real ones, in the format of the data set."""
    job.data.save_samples(
        path,
        sequences,
        first_tokens(job.dataset, range(len(sequences))),
        model=job.resolved.model,
        title=job.config.job.description,
    )


class Pace:
    """Estimates whether sampling stays within `limit_seconds`, counted from its creation."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._start = self._last = clock()
        self._was_kept = True
        # (tokens left, seconds per token) at each check since the number of sequences changed.
        self._looks: list[tuple[int, float]] = []

    def keeps(self, num_drawn: int, num_left: int) -> bool:
        """Whether there is time for `num_left` more tokens; if not, the caller drops sequences.

        `num_drawn` tokens have been sampled since the last call.
        """
        now = self._clock()
        self._looks.append((num_left, (now - self._last) / num_drawn))
        self._last = now
        self._was_kept = now - self._start + self._forecast() <= self._limit_seconds
        if not self._was_kept:
            self._looks.clear()
        return self._was_kept

    def _forecast(self) -> float:
        """The estimated seconds for the tokens that are left.

        The cost of a token grows with its position, so a line is fitted to the checks.
        """
        num_left, seconds_each = self._looks[-1]
        if len(self._looks) < LOOKS_FOR_A_LINE:
            return num_left * seconds_each
        slope, at_end = statistics.linear_regression(*zip(*self._looks, strict=True))
        return num_left * (at_end + slope * num_left / 2)

    def allows_another(self) -> bool:
        """Whether to start another batch: if none was cut short, and half of the time is left."""
        self._last = self._clock()
        return self._was_kept and 2 * (self._last - self._start) <= self._limit_seconds


@torch.inference_mode()
def generate(
    model: Any,
    tokens_BT: Tensor,
    seq_len: int,
    generators: list[torch.Generator],
    temperature: float = 1.0,
    *,
    pace: Pace | None = None,
    on_tokens: Callable[[int], None] = lambda num_drawn: None,
) -> Tensor:
    """Extend `tokens_BT` to `seq_len` tokens; each row has its own random generator.

    If `pace` predicts that the time is too short, the last half of the rows is dropped, down to one
    row. A model without `make_cache` processes all tokens so far for each new one.
    """
    model.eval()
    cache = model.make_cache(seq_len) if hasattr(model, "make_cache") else None
    new = tokens_BT
    for drawn in range(tokens_BT.size(1), seq_len):
        if cache is None:
            logits_BTV = call_model(model, make_batch(tokens_BT))
        else:
            logits_BTV = model(new, cache=cache)
        logits_BV = logits_BTV[:, -1].float() / temperature
        # Gumbel-max: the noise is drawn on the CPU, so every device samples the same tokens.
        uniform = torch.stack([torch.rand(logits_BV.size(1), generator=g) for g in generators])
        gumbel_BV = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        new = (logits_BV + gumbel_BV.to(logits_BV.device)).argmax(-1, keepdim=True)
        tokens_BT = torch.cat([tokens_BT, new], dim=1)
        if drawn % TOKENS_A_LOOK == 0:
            on_tokens(drawn)
            if pace and not pace.keeps(TOKENS_A_LOOK, seq_len - drawn) and len(generators) > 1:
                rows = len(generators) // 2
                generators, tokens_BT, new = generators[:rows], tokens_BT[:rows], new[:rows]
                if cache is not None:
                    cache.keep_first(rows)
    return tokens_BT


@torch.no_grad()
def whole_model(job: Job) -> nn.Module:
    """The plain model with the job's weights, replicated on every rank; every rank must call this.

    On CPU, bfloat16 weights become float32, in which attention with one query is faster.
    """
    spec = load_model_spec(job.config)
    dtype = DTYPES[job.config.training.dtype]
    if job.world.device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float32
    sizes, seed = job.resolved.model, job.config.debug.seed
    with torch.device("meta"):
        model = build_model(spec, sizes, dtype)
    tied = find_tied(model)
    if not has_buffers(model) or draws_by_name(model):
        model.to_empty(device=job.world.device)
        init_buffers(model, seed)
    else:
        model = initial_model(spec, sizes, dtype, seed).to(job.world.device)
    tie(model, tied)
    own = dict(model.named_parameters())
    for name, whole in job.whole_parameters():
        own[name].copy_(whole)
    buffers = dict(model.named_buffers())
    for part in job.parts:
        for name, buffer in part.named_buffers():
            buffers[canonical_name(name)].copy_(whole_tensor(buffer))
    return model


def _is_taken(job: Job, name: str) -> bool:
    """Whether any part of the model, on any rank, takes the batch field `name`."""
    is_taken = any(takes(part, name) for part in job.parts)
    taken = torch.tensor(int(is_taken), device=job.world.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return bool(taken)


def _fits(job: Job) -> bool:
    """Whether the whole model takes at most half of the free memory of each rank."""
    free = free_memory_bytes(job.world.device)
    if job.world.device.type == "cpu":
        free //= job.world.local_size
    enough = torch.tensor(int(2 * job.model_bytes <= free), device=job.world.device)
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    return bool(enough)
