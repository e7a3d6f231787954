"""Sample sequences from the model of a job: autoregressively, with a key/value cache.

The weights are gathered into the plain model on every rank, under any plan, and the sequences are
divided among the ranks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.config import load_model_spec
from titanlite.data.sampler import read_batch
from titanlite.errors import TitanliteError
from titanlite.job import Job
from titanlite.models.build import build_model, initial_model
from titanlite.modules.batch import FieldDims, call_model, make_batch, takes
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import whole_tensor
from titanlite.modules.tied import find_tied, tie
from titanlite.parallelize.part import DTYPES
from titanlite.parallelize.tensor_account import BUFFER
from titanlite.training.initial_weights import (
    draws_by_name,
    generator_for,
    has_buffers,
    init_buffers,
)

# The most tokens in one batch of sequences, which bounds the key/value cache.
TOKENS_AT_ONCE = 16 * 3072
# Tokens between two time checks.
TOKENS_A_LOOK = 128
# Time checks needed to estimate the growth of the cost per token.
LOOKS_FOR_A_LINE = 4
WAIT_SECONDS = 3600
# Tokens that are decoded again with each new one.
CONTEXT = 32


@dataclass(frozen=True)
class Choice:
    """The distribution from which tokens are sampled.

    Logits are divided by `temperature`; 0 always takes the likeliest token. Then only the `top_k`
    likeliest tokens are kept, and of these the likeliest whose probabilities, before any was
    dropped, first add up to `top_p` (Holtzman et al. 2019, arXiv 1904.09751). Logits from
    `vocab_size` on are padding of the vocabulary and are never sampled.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    vocab_size: int | None = None

    def __call__(self, logits_BV: Tensor, generators: list[torch.Generator]) -> Tensor:
        """The next token of each row, int64 [B, 1]; one random generator per row."""
        logits_BV = self.keep(logits_BV.float())
        if self.temperature == 0:
            return logits_BV.argmax(-1, keepdim=True)
        # Gumbel-max: the noise is drawn on the CPU, so every device samples the same tokens.
        uniform = torch.stack([torch.rand(logits_BV.size(1), generator=g) for g in generators])
        gumbel_BV = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        return (logits_BV + gumbel_BV.to(logits_BV.device)).argmax(-1, keepdim=True)

    def keep(self, logits_BV: Tensor) -> Tensor:
        """The logits at this temperature, -inf for tokens that are not kept."""
        if self.vocab_size is not None and self.vocab_size < logits_BV.size(1):
            logits_BV = logits_BV.clone()
            logits_BV[:, self.vocab_size :] = -torch.inf
        if self.temperature == 0:
            return logits_BV
        logits_BV = logits_BV / self.temperature
        if self.top_k is None and self.top_p == 1:
            return logits_BV
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        # The likeliest token is always kept: nothing comes before it.
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        is_out_BV = before_BV >= self.top_p
        if self.top_k is not None:
            is_out_BV[:, self.top_k :] = True
        sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
        return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)


# Sampling from the model's own distribution.
ALL = Choice()


def sample_sequences(
    job: Job,
    num_samples: int,
    *,
    limit_seconds: float = 60,
    on_tokens: Callable[[int], None] = lambda num_drawn: None,
    on_new: Callable[[Tensor], None] = lambda new: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Up to `num_samples` sampled sequences as tokens [N, T]; every rank must call this.

    T is sampling.num_tokens, or else the training length. Text starts with sampling.prompt, as if
    a document began there, and has only end-of-text tokens after the first; other data start with
    the first tokens of a training sample, as many as the data set defines. The other tokens are
    sampled as [sampling] says, with debug.seed. The sequences are the same for every plan with the
    same weights, up to rounding error. If all would take longer than `limit_seconds`, a rank drops
    as many as necessary, but keeps at least one. `on_tokens` is called regularly with the number of
    tokens sampled so far per sequence, and `on_new` with each new token of all sequences that a
    rank samples at once, [B, 1]. If `is_stopped` becomes true, a rank drops its unfinished
    sequences. Raises NoSamplesError if the whole model does not fit in memory beside the shards, or
    needs batch fields other than tokens, positions and documents.
    """
    section = job.config.sampling
    if not job.data.has_tokens:
        raise NoSamplesError(f"the samples of {job.data.name} are not tokens")
    for name in job.data.fields:
        is_taken = any(takes(part, name) for part in job.parts)
        if name not in ("targets", "positions", "documents") and _on_any_rank(job, is_taken):
            raise NoSamplesError(f"the model takes `{name}`, which sampling cannot provide")
    if not _fits(job):
        raise NoSamplesError("the whole model does not fit on one rank")
    # A rank that samples nothing, or is faster, waits for the others at the end.
    job.world.set_timeout(WAIT_SECONDS, "the limit of sampling")
    model, seq_len = whole_model(job), section.num_tokens or job.resolved.seq_len
    start = job.data.start_tokens(section.prompt)
    choice = Choice(section.temperature, section.top_k, section.top_p, job.data.vocab_size)
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
        if start is None:
            real = read_batch(job.dataset, drawn, job.data.fields).tokens
            prompts = real[:, : job.data.prompt_length]
        else:
            prompts = torch.tensor([start[:seq_len]] * len(drawn))
        generators = [generator_for(job.config.debug.seed, f"sample {index}") for index in drawn]
        try:
            tokens = generate(
                model,
                prompts.to(job.world.device),
                seq_len,
                generators,
                choice,
                end_token=job.data.end_token,
                separates_documents="documents" in job.data.fields,
                pace=pace,
                on_tokens=look,
                on_new=on_new,
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
        read_batch(job.dataset, range(len(sequences)), job.data.fields).tokens,
        model=job.resolved.model,
        title=job.config.job.description,
    )


class Pace:
    """Estimates whether sampling stays within `limit_seconds`, counted from its creation."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._limit_seconds = clock, limit_seconds
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
        """Estimated seconds for the tokens left: a line through the checks, as costs grow."""
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
    choice: Choice = ALL,
    *,
    end_token: int | None = None,
    separates_documents: bool = False,
    pace: Pace | None = None,
    on_tokens: Callable[[int], None] = lambda num_drawn: None,
    on_new: Callable[[Tensor], None] = lambda new: None,
) -> Tensor:
    """Extend `tokens_BT` to `seq_len` tokens; each row has its own random generator.

    After the first sampled `end_token` of a row, all its tokens are end tokens. With
    `separates_documents`, an `end_token` ends a document, also in `tokens_BT`: the model gets the
    fields "documents" and "positions" as in training on separate documents.

    If `pace` predicts that the time is too short, the last half of the rows is dropped, down to one
    row. A model without `make_cache` processes all tokens so far for each new one.
    """
    model.eval()
    cache = model.make_cache(seq_len) if hasattr(model, "make_cache") else None
    new = tokens_BT
    has_ended_B1 = torch.zeros_like(tokens_BT[:, :1], dtype=torch.bool)
    for drawn in range(tokens_BT.size(1), seq_len):
        fields = number_documents(tokens_BT, end_token) if separates_documents else {}
        if cache is None:
            documents = {"documents": (fields["documents"], FieldDims(0, 1))} if fields else None
            batch = make_batch(tokens_BT, positions=fields.get("positions"), more=documents)
            logits_BTV = call_model(model, batch)
        else:
            of_new = {name: field[:, -new.size(1) :] for name, field in fields.items()}
            logits_BTV = model(new, cache=cache, **of_new)
        new = choice(logits_BTV[:, -1], generators)
        if end_token is not None:
            new = new.masked_fill(has_ended_B1, end_token)
            has_ended_B1 |= new == end_token
        tokens_BT = torch.cat([tokens_BT, new], dim=1)
        on_new(new)
        if end_token is not None and bool(has_ended_B1.all()):
            return F.pad(tokens_BT, (0, seq_len - tokens_BT.size(1)), value=end_token)
        if drawn % TOKENS_A_LOOK == 0:
            on_tokens(drawn)
            if pace and not pace.keeps(TOKENS_A_LOOK, seq_len - drawn) and len(generators) > 1:
                rows = len(generators) // 2
                generators, tokens_BT, new = generators[:rows], tokens_BT[:rows], new[:rows]
                has_ended_B1 = has_ended_B1[:rows]
                if cache is not None:
                    cache.keep_first(rows)
    return tokens_BT


def number_documents(tokens_BT: Tensor, end_token: int | None) -> dict[str, Tensor]:
    """The fields "documents" and "positions" [B, T] of tokens, as training data have them.

    An `end_token` is the last token of its document.
    """
    is_first = torch.zeros_like(tokens_BT, dtype=torch.bool)
    is_first[:, 1:] = tokens_BT[:, :-1] == end_token
    places = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
    starts = (places * is_first).cummax(dim=1).values
    return {"documents": is_first.cumsum(dim=1), "positions": places - starts}


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
    for name, whole in job.merged_parameters():
        own[name].copy_(whole)
    buffers = dict(model.named_buffers())
    for part in job.parts:
        for name, buffer in part.named_buffers():
            buffers[canonical_name(name)].copy_(whole_tensor(buffer))
    for name, buffer in _whole_buffers(job):
        buffers[name].copy_(buffer)
    return model


def _fits(job: Job) -> bool:
    """Whether the whole model takes at most half of the free memory of each rank."""
    free = _free_memory_bytes(job.world.device)
    if job.world.device.type == "cpu":
        free //= job.world.local_size
    return not _on_any_rank(job, 2 * job.model_bytes > free)


def _on_any_rank(job: Job, is_so: bool) -> bool:
    found = torch.tensor(int(is_so), device=job.world.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


class TextWriter:
    """Prints a sampled text token by token, after its `prompt`, up to the end-of-text token.

    A character is printed once all its bytes are there.
    """

    def __init__(self, tokenizer: Any, prompt: str, stream: TextIO | None = None) -> None:
        self._tokenizer = tokenizer
        self._stream = sys.stdout if stream is None else stream
        # The text of a token can depend on the one before it, so the prompt's are kept.
        self._tokens: list[int] = tokenizer.encode([prompt])[0].tolist()
        self._has_ended = False
        self._shown = 0
        self._show()

    def add(self, token: int) -> None:
        if token == self._tokenizer.end_of_text:
            self._has_ended = True
        if not self._has_ended:
            self._tokens.append(token)
            self._show()

    def close(self) -> None:
        self._show(is_last=True)
        print(file=self._stream, flush=True)

    def _show(self, *, is_last: bool = False) -> None:
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd") and not is_last:
            return
        print(text[self._shown :], end="", file=self._stream, flush=True)
        self._shown = len(text)
        if len(self._tokens) > 2 * CONTEXT:
            self._tokens = self._tokens[-CONTEXT:]
            self._shown = len(self._tokenizer.decode(self._tokens))


def _whole_buffers(job: Job) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, persistent buffer), the first of all copies; a collective call."""
    own = {name: whole_tensor(buffer) for name, buffer in job.buffers.items()}
    if job.pipeline is None:
        yield from own.items()
        return
    device, group = job.world.device, job.pipeline.group
    for name, one in job.tensors.items():
        if one.kind != BUFFER:
            continue
        place = job.pipeline.table.stage_to_rank[one.stages[0]]
        is_here = one.stages[0] in job.stage_numbers
        found: list[Any] = [own[name].cpu() if is_here else None]
        # Of a buffer of another stage neither shape nor dtype is known here.
        dist.broadcast_object_list(found, group=group, group_src=place)
        yield name, found[0].to(device)


def _free_memory_bytes(device: torch.device) -> int:
    """The free memory of `device`: of the GPU, or of the machine for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
