"""Llama 3 on H100 and H200: published runs, and the planner's prediction of each.

TorchTitan's Llama 3 8B in bfloat16 gives the two fitted figures of its H100. All other rows are
predicted: titanlite.tools.planner traces the job in eager mode, as for a GPU, and fuses elementwise
operators where the run was compiled.

TorchTitan, by its documentation and its defaults of that time: the local batch is split into as
many microbatches as there are pipeline stages of one rank each, and an interleaved pipeline has two
stages a rank. Its ring of context parallelism is that of PyTorch 2.6 (as_torch_2_6). titanlite has
no asynchronous tensor parallelism in float8, so such a row is the float8 row without
what the rings save in bfloat16.

The Llama 3 paper does not give the stages of a rank. The rows have the number that is predicted to
be the fastest of those that the schedule allows, as for the microbatch of Narayanan et al.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.tools.planner import fake_world
from titanlite.tools.planner.cache import key_of, load_pieces
from titanlite.tools.planner.compose import compose
from titanlite.tools.planner.composition import Pieces, Segment, smaller
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Communication, Event, Wait
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.predict import predict as predict_step
from titanlite.tools.planner.timing import StepTime

TITAN = "h100_96gb"
STAGES = (1, 2, 4, 8)
"""Of a rank, where a paper does not give them."""


@dataclass(frozen=True)
class Llama:
    """A published run of Llama 3: tokens/s of a GPU, or TFLOP/s if `is_tflops`.

    `num_blocks` is what a pipeline splits evenly if the number of stages is not known: the layers,
    embeddings and output.
    """

    name: str
    hardware: str
    flavor: str
    parallelism: dict[str, Any]
    local_batch: int
    recomputes: str
    is_compiled: bool
    published: float
    seq_len: int = 8192
    is_tflops: bool = False
    is_float8: bool = False
    is_async: bool = False
    num_blocks: int = 0
    has_torch_ring: bool = False
    """Whether its context parallelism is PyTorch's."""

    def resolve(self, **parallelism: Any) -> ResolvedJob:
        degrees = {**self.parallelism, **parallelism}
        if self.is_async:
            degrees |= {
                "enable_async_tensor_parallel": True,
                "async_tensor_parallel_backend": "ring",
            }
        dp = degrees["data_parallel_shard_degree"]
        section = {
            "mode": self.recomputes,
            **({"selective_ac_option": "op"} if self.recomputes == "selective" else {}),
        }
        values: dict[str, Any] = {
            "job": {"device": "cuda"},
            "model": {"name": "llama3", "flavor": self.flavor},
            "training": {
                "dataset": "synthetic",
                "seq_len": self.seq_len,
                "local_batch_size": self.local_batch,
                "global_batch_size": self.local_batch * dp,
                "mixed_precision_param": "bfloat16",
                "mixed_precision_reduce": "float32",
            },
            "parallelism": degrees,
            "activation_checkpoint": section,
        }
        if self.is_float8:
            values["model"]["converters"] = ["quantize.linear.float8"]
            # As the command of the H200 runs has it, and TorchTitan's docs/float8.md.
            gathers = {
                "enable_fsdp_float8_all_gather": True,
                "precompute_float8_dynamic_scale_for_fsdp": True,
            }
            values["quantize"] = {"linear": {"float8": gathers}}
        return resolve_job(JobConfig.from_dict(values), None)


def _fsdp(shards: int, tp: int = 1, cp: int = 1) -> dict[str, Any]:
    return {
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": tp,
        "context_parallel_degree": cp,
        "context_parallel_rotate_method": "allgather",
    }


def _titan(
    name: str,
    flavor: str,
    degrees: dict[str, Any],
    local_batch: int,
    recomputes: str,
    published: float,
    **others: Any,
) -> Llama:
    known = {"is_compiled": True, "is_float8": True, **others}
    return Llama(
        name, TITAN, flavor, degrees, local_batch, recomputes, published=published, **known
    )


def _titan_405b(cp: int, schedule: str, microbatch: int) -> dict[str, Any]:
    return {
        **_fsdp(8 // cp, 8, cp),
        "pipeline_parallel_degree": 8,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_microbatch_size": microbatch,
    }


def _llama_405b(
    gpus: str, shards: int, batch: int, published: float, cp: int = 1, seq_len: int = 8192
) -> Llama:
    degrees = {**_fsdp(shards, 8, cp), "pipeline_parallel_degree": 16}
    return Llama(
        *(f"405B, {gpus} GPUs{', CP 16' if cp > 1 else ''}", "h100", "405B", degrees, batch),
        *("none", True, published, seq_len, True),
        num_blocks=128,
    )


# TorchTitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3.
FITTED = [
    _titan(
        name, "8B", _fsdp(gpus), 2, "selective", published, is_float8=False, is_compiled=is_compiled
    )
    for name, gpus, is_compiled, published in (
        ("8B, 8 GPUs, eager", 8, False, 5762),
        ("8B, 8 GPUs", 8, True, 6667),
        ("8B, 128 GPUs, eager", 128, False, 5605),
        ("8B, 128 GPUs", 128, True, 6514),
    )
]
SHARDED_70B: Any = ("70B", _fsdp(32, 8), 16, "full")
# The same file, and benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md for 70B in bfloat16.
TITAN_PREDICTED = [
    _titan("8B, 8 GPUs, float8", "8B", _fsdp(8), 2, "selective", 8532),
    _titan("8B, 128 GPUs, float8", "8B", _fsdp(128), 2, "selective", 8380),
    _titan("70B, 256 GPUs", *SHARDED_70B, 597.3, is_float8=False),
    _titan("70B, 256 GPUs, async TP", *SHARDED_70B, 652.4, is_float8=False, is_async=True),
    _titan("70B, 256 GPUs, float8", *SHARDED_70B, 829),
    _titan("70B, 256 GPUs, float8, async TP", *SHARDED_70B, 876, is_async=True),
    *(
        _titan(name, "405B", degrees, batch, "full", published, seq_len=seq_len, is_async=True)
        for name, degrees, batch, published, seq_len in (
            ("405B, 512 GPUs, 1F1B", _titan_405b(1, "1F1B", 4), 32, 100, 8192),
            ("405B, 512 GPUs, interleaved", _titan_405b(1, "Interleaved1F1B", 4), 32, 128, 8192),
            ("405B, 512 GPUs, 32k tokens", _titan_405b(1, "1F1B", 1), 8, 76, 32768),
        )
    ),
    _titan("8B, 8 GPUs, 32k tokens", "8B", _fsdp(8), 1, "full", 3890, seq_len=32768),
]
# The same file, tables 2 and 6: context parallelism.
RINGS = [
    *(
        _titan(
            *(f"8B, CP {cp}", "8B", _fsdp(8 // cp, 1, cp), 1, "full", tokens),
            seq_len=32768 * cp,
            has_torch_ring=True,
        )
        for cp, tokens in ((2, 2540), (4, 1071), (8, 548))
    ),
    *(
        _titan(
            *(f"405B, CP {cp}", "405B", _titan_405b(cp, "1F1B", 1), 8, "full", tokens),
            seq_len=32768 * cp,
            is_async=True,
            has_torch_ring=True,
        )
        for cp, tokens in ((2, 47), (4, 31), (8, 16))
    ),
]
# arXiv 2407.21783, table 4.
PAPER = [
    _llama_405b("8,192", 64, 32, 430),
    _llama_405b("16,384", 128, 16, 400),
    _llama_405b("16,384", 8, 16, 380, 16, 131072),
]
# TorchTitan's benchmarks/llama3_8b_h200_2025-06_torchtitan.md. No figure of the H200 is fitted.
H200 = [
    replace(
        TITAN_PREDICTED[0], name=name, hardware="h200", parallelism=_fsdp(gpus), published=tokens
    )
    for name, gpus, tokens in (
        ("8B, 32 H200, float8", 32, 10938),
        ("8B, 64 H200, float8", 64, 10753),
    )
]
PREDICTED = [*TITAN_PREDICTED, *PAPER, *H200]


_PIECES: dict[str, Pieces] = {}


@cache
def _hardware(name: str) -> Hardware:
    return load_hardware(name)


def step_time(row: Llama, hardware: Hardware | None = None, **parallelism: Any) -> StepTime:
    """The predicted step of a row; `parallelism` replaces keys of that section."""
    resolved = row.resolve(**parallelism)
    pieces = pieces_of_torch_2_6(resolved)
    if row.has_torch_ring:
        model: Any = resolved.model
        pieces = as_torch_2_6(pieces, resolved.dims.cp, model.n_heads // model.kv_heads)
    cost = Cost(hardware or _hardware(row.hardware), resolved.dims, is_compiled=row.is_compiled)
    return predict_step(resolved, compose(resolved, pieces), cost, pieces).step


def pieces_of_torch_2_6(resolved: ResolvedJob) -> Pieces:
    """The pieces of a job whose RMSNorm is put together from other operators.

    PyTorch has a fused one on GPUs since 2.9; the published runs are older.
    """
    key = key_of(smaller(resolved))
    if key not in _PIECES:
        with patch.object(fake_world, "fused_rms_norm", torch.rms_norm):
            _PIECES[key] = load_pieces(resolved, use_cache=False)
    return _PIECES[key]


def as_torch_2_6(pieces: Pieces, cp: int, repeats: int) -> Pieces:
    """The pieces with the messages of PyTorch's ring of context parallelism, December 2024.

    TorchTitan repeats the heads of K and V before attention, `repeats` times, and the ring moves
    what it is given (torchtitan/models/llama/model.py). The ring gathers K and V; their gradients,
    in float32, it sends on after each of its `cp` steps (_templated_ring_attention_backward in
    torch/distributed/tensor/experimental/_attention.py). In a compiled block each is waited for
    where it is issued: _functional_collectives.py does so while a graph is traced, and the
    inductor's config has reorder_for_compute_comm_overlap = False. The gather of the recomputation
    serves the backward pass too, since its graph has equal operators once
    (_functorch/compile_utils.py, fx_graph_cse).
    """

    def changed(segment: Segment) -> Segment:
        return replace(segment, events=tuple(with_ring_of_torch_2_6(segment.events, cp, repeats)))

    blocks = (
        replace(part, forward=changed(part.forward), backward=changed(part.backward))
        for part in pieces.blocks
    )
    return replace(pieces, blocks=tuple(blocks))


def with_ring_of_torch_2_6(events: Sequence[Event], cp: int, repeats: int) -> Iterator[Event]:
    """The events of a block with the messages of that ring, see as_torch_2_6."""
    replaced: set[int] = set()
    number = max((e.number for e in events if isinstance(e, Communication)), default=0)
    for event in events:
        if isinstance(event, Wait) and event.number in replaced:
            continue
        if not (
            isinstance(event, Communication)
            and event.axis == "cp"
            and event.kind in ("all_gather", "reduce_scatter")
        ):
            yield event
            continue
        num_bytes = event.num_bytes * repeats
        replaced.add(event.number)
        if event.kind == "all_gather":
            if event.place.phase != "backward":
                yield replace(event, num_bytes=num_bytes)
                yield Wait(event.number)
            continue
        for _ in range(cp):
            messages = [
                replace(event, kind=kind, num_bytes=num_bytes // cp, number=number + at, peer=peer)
                for at, (kind, peer) in enumerate((("send", 1), ("receive", cp - 1)), 1)
            ]
            number += len(messages)
            yield from messages
            yield from (Wait(message.number) for message in messages)


def best_stages(row: Llama) -> int:
    """The stages of a rank that are predicted to be the fastest."""
    return min(STAGES, key=lambda stages: _seconds(row, None, **stages_of(row, stages)))


def stages_of(row: Llama, stages: int) -> dict[str, Any]:
    """The keys of an interleaved pipeline with `stages` of equal size on each rank."""
    ranks = row.parallelism["pipeline_parallel_degree"]
    return {
        "pipeline_parallel_schedule": "Interleaved1F1B" if stages > 1 else "1F1B",
        "pipeline_parallel_layers_per_stage": row.num_blocks // ranks // stages,
    }


def unbalanced(row: Llama) -> Llama:
    """The row with a contiguous part of the sequence on each rank; the last has the most work."""
    layout = {"context_parallel_load_balancer": "none"}
    return replace(row, parallelism={**row.parallelism, **layout})


def predict(row: Llama, hardware: Hardware | None = None, **parallelism: Any) -> float:
    """Tokens/s or TFLOP/s of a GPU, as the row gives."""
    if row.num_blocks and not parallelism:
        parallelism = stages_of(row, best_stages(row))
    if row.is_tflops:
        mfu = step_time(row, hardware, **parallelism).mfu
        assert mfu is not None
        return mfu * (hardware or _hardware(row.hardware)).peak("bfloat16") / 1e12
    resolved = replace(row, is_async=False).resolve(**parallelism)
    tokens = resolved.global_batch_size * resolved.seq_len / resolved.dims.world_size
    return tokens / _seconds(row, hardware, **parallelism)


def _seconds(row: Llama, hardware: Hardware | None, **parallelism: Any) -> float:
    """The seconds of a step."""
    if row.is_float8 and row.is_async:
        plain = replace(row, is_float8=False)
        saved = _seconds(replace(plain, is_async=False), hardware, **parallelism)
        saved -= _seconds(plain, hardware, **parallelism)
        return _seconds(replace(row, is_async=False), hardware, **parallelism) - saved
    return step_time(row, hardware, **parallelism).seconds
