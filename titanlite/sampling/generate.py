"""Draw sequences from a trained job: one token after the other, with a key/value cache.

The weights are gathered from whatever plan trained them into the plain model, and the sequences
are shared out over the ranks.
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
from titanlite.names import canonical_name
from titanlite.parallelize import DTYPES
from titanlite.ranks.world import free_memory_bytes
from titanlite.training.initialize import generator_for, init_buffers
from titanlite.training.shards import whole_tensor

# Sequences of so many tokens in all are drawn side by side, which bounds their keys and values.
TOKENS_AT_ONCE = 16 * 3072
# Tokens from one look at the clock to the next.
TOKENS_A_LOOK = 128
# Looks after which the growth of a token's cost can be told from noise.
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

    Each begins as a training sample does, with as many of its tokens as the data set says; each
    other token is drawn from the model's logits over `temperature`. The same sequences come from
    every plan with the same weights, up to rounding. Where all would take longer than
    `limit_seconds`, a rank gives up as many as it has to, but for one. `on_tokens` hears now and
    then how many tokens of each sequence this rank has drawn. Where `is_stopped` comes true a rank
    gives up what it has begun. Raises NoSamplesError where the whole model does not fit beside its
    shards, and where it takes more of a batch than its tokens and their positions.
    """
    for name in job.data.fields:
        if name not in ("targets", "positions") and _is_taken(job, name):
            raise NoSamplesError(f"the model takes `{name}`, which sampled tokens do not have")
    if not _fits(job):
        raise NoSamplesError("the whole model does not fit on one rank")
    # A rank that draws none, or is quicker, waits for the others at the end.
    job.world.set_timeout(WAIT_SECONDS, "the limit of sampling")
    model, seq_len = whole_model(job), job.resolved.seq_len
    # A sequence and whether it is there, both zero on all ranks but the one that drew it.
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
    """Why nothing can be sampled; the same on every rank."""


class _StoppedError(Exception):
    """Raised at a look, to leave sequences that are half drawn."""


def save_samples(job: Job, sequences: Tensor, path: Path) -> None:
    """Show sampled sequences beside as many real ones, as the data set's samples are shown."""
    job.data.save_samples(
        path,
        sequences,
        first_tokens(job.dataset, range(len(sequences))),
        model=job.resolved.model,
        title=job.config.job.description,
    )


class Pace:
    """Whether drawing keeps within `limit_seconds`, which run from when it is made."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit_seconds = limit_seconds
        self._start = self._last = clock()
        self._was_kept = True
        # Tokens left and seconds a token, at each look since there were as many sequences as now.
        self._looks: list[tuple[int, float]] = []

    def keeps(self, num_drawn: int, num_left: int) -> bool:
        """Whether `num_left` tokens fit in, after `num_drawn` more; if not, some are given up."""
        now = self._clock()
        self._looks.append((num_left, (now - self._last) / num_drawn))
        self._last = now
        self._was_kept = now - self._start + self._forecast() <= self._limit_seconds
        if not self._was_kept:
            self._looks.clear()
        return self._was_kept

    def _forecast(self) -> float:
        """The seconds that what is left will take.

        A token costs more the more there are before it, which a line through the looks foresees.
        """
        num_left, seconds_each = self._looks[-1]
        if len(self._looks) < LOOKS_FOR_A_LINE:
            return num_left * seconds_each
        slope, at_end = statistics.linear_regression(*zip(*self._looks, strict=True))
        return num_left * (at_end + slope * num_left / 2)

    def allows_another(self) -> bool:
        """Whether to begin a batch of sequences: the first, and while at least half is left."""
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
    """Continue `tokens_BT` to `seq_len` tokens; each row has its own generator.

    Rows from the last on are given up where `pace` is not kept. A model without `make_cache` reads
    all tokens so far for each new one.
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
        # Gumbel-max: the noise is drawn on the CPU, so that every device draws the same tokens.
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
    """The plain model with the job's weights, whole on every rank; every rank must call this.

    bfloat16 weights become float32 on CPU, where attention to one query is faster in that.
    """
    spec = load_model_spec(job.config)
    dtype = DTYPES[job.config.training.dtype]
    if job.world.device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float32
    with torch.device("meta"):
        model = spec.load_model_class()(job.resolved.model).to(dtype)
    model.to_empty(device=job.world.device)
    own = dict(model.named_parameters())
    for name, whole in job.whole_parameters():
        own[name].copy_(whole)
    init_buffers(model, job.config.debug.seed)
    buffers = dict(model.named_buffers())
    for part in job.parts:
        for name, buffer in part.named_buffers():
            buffers[canonical_name(name)].copy_(whole_tensor(buffer))
    return model


def _is_taken(job: Job, name: str) -> bool:
    """Whether any part of the model takes a field of that name."""
    is_taken = any(takes(part, name) for part in job.parts)
    taken = torch.tensor(int(is_taken), device=job.world.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return bool(taken)


def _fits(job: Job) -> bool:
    """Whether the whole weights take at most half of what each rank has free."""
    free = free_memory_bytes(job.world.device)
    if job.world.device.type == "cpu":
        free //= job.world.local_size
    enough = torch.tensor(int(2 * job.model_bytes <= free), device=job.world.device)
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    return bool(enough)
