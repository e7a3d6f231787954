"""What a trace for a GPU has that one for the CPU has not, on a machine without a GPU."""

import json
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from titanlite.config import JobConfig, ResolvedJob, resolve_job
from titanlite.config.load import override
from titanlite.modules.attention import CausalAttention
from titanlite.tools.planner.allocator import Allocator
from titanlite.tools.planner.cache import key_of
from titanlite.tools.planner.compose import compose
from titanlite.tools.planner.events import Allocation, Operator, Site, Trace
from titanlite.tools.planner.pieces import trace_pieces
from titanlite.tools.planner.planning import plan_job
from titanlite.tools.planner.trace import trace_rank

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
MIB = 1 << 20
PRODUCT8 = "aten::_scaled_mm"
EVIDENCE = Path(__file__).parents[4] / "docs/evidence/gpu"


def job(
    device: str,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    activation_checkpoint: str = "none",
    **plan: Any,
) -> ResolvedJob:
    config = JobConfig.from_dict(
        {
            "job": {"device": device},
            "model": {"name": "llama3", "flavor": "tiny", **(model or {})},
            "training": {
                "dataset": "synthetic",
                "seq_len": 2048,
                "global_batch_size": 2,
                "local_batch_size": 2,
                "mixed_precision_param": "bfloat16",
                **(training or {}),
            },
            "parallelism": {"data_parallel_shard_degree": 1, **plan},
            "activation_checkpoint": {"mode": activation_checkpoint},
        }
    )
    return resolve_job(config, None)


def named(trace: Trace, name: str) -> list[Operator]:
    return [one for one in trace.operators if one.name == name]


def test_local_scales_are_reduced_over_no_tokens() -> None:
    float8 = {"converters": ["quantize.linear.float8"]}
    shared = job("cpu", float8, {"local_batch_size": 1}, data_parallel_shard_degree=2)
    local = override(shared.config, {"quantize.linear.float8.local_scales": True})
    reduced = ("all_reduce", "dp_shard")
    assert reduced in trace_rank(shared, 0).totals()
    assert reduced not in trace_rank(resolve_job(local, None), 0).totals()


def test_documents_on_a_gpu_have_no_mask_in_bfloat16() -> None:
    def largest(dtype: str, is_whole: bool) -> tuple[Trace, int]:
        text = {"dataset": "pydoc", "attend_across_documents": is_whole}
        trace = trace_rank(job("cuda", training={**text, "mixed_precision_param": dtype}), 0)
        return trace, max(one.num_bytes for one in trace.events if isinstance(one, Allocation))

    mask = 2 * 2048**2
    (apart, most), (whole, _) = largest("bfloat16", False), largest("bfloat16", True)
    assert most < mask <= largest("float32", False)[1]
    assert named(apart, "aten::_flash_attention_backward")
    assert not named(apart, ATTENTION)
    assert apart.flops == whole.flops
    # A kernel for documents keeps the gradients of each head's keys and values for a moment.
    assert whole.peak().num_bytes <= apart.peak().num_bytes < 1.05 * whole.peak().num_bytes


def test_windows_on_a_gpu_have_no_mask_in_bfloat16() -> None:
    attend = partialmethod(CausalAttention.forward, window=128)
    with patch.object(CausalAttention, "forward", attend):
        trace = trace_rank(job("cuda"), 0)
    kernels = [one for one in trace.operators if "flash_attention" in one.name]
    assert {one.causal for one in kernels} == {(2048, 2048, 128)}
    most = max(one.num_bytes for one in trace.events if isinstance(one, Allocation))
    assert most < 2 * 2048**2


def test_a_gpu_multiplies_in_float8_and_the_cpu_emulates_it() -> None:
    float8 = {"converters": ["quantize.linear.float8"]}
    on_gpu, on_cpu = (trace_rank(job(device, float8), 0) for device in ("cuda", "cpu"))
    products = named(on_gpu, PRODUCT8)
    assert products
    assert not named(on_cpu, PRODUCT8)
    # The same operations, though the CPU joins products whose scales differ.
    plain = {name: sum(one.flops for one in named(on_gpu, name)) for name in (PRODUCT8, "aten::mm")}
    assert sum(plain.values()) == sum(one.flops for one in named(on_cpu, "aten::mm"))


def test_a_gpu_skips_the_masked_half_by_itself() -> None:
    plan = {"context_parallel_degree": 2}
    on_gpu, on_cpu = (trace_rank(job(device, **plan), 0) for device in ("cuda", "cpu"))
    of_gpu, of_cpu = named(on_gpu, ATTENTION), named(on_cpu, ATTENTION)
    # Of a rank's two blocks one is causal, and it is not split.
    assert [one.causal for one in of_gpu[:2]] == [(1024, 1024), ()]
    assert len(of_cpu) > len(of_gpu)
    assert all(one.causal in ((), (256, 256)) for one in of_cpu)
    assert key_of(job("cuda", **plan)) != key_of(job("cpu", **plan))


def test_a_gpu_has_a_kernel_for_rmsnorm() -> None:
    on_gpu, on_cpu = (trace_rank(job(device), 0) for device in ("cuda", "cpu"))
    norms = [one for one in on_gpu.operators if "layer_norm" in one.name]
    assert len(norms) == 2 * (2 * job("cuda").model.n_layers + 1)  # forward and backward
    assert not [one for one in on_cpu.operators if "layer_norm" in one.name]
    kept = [one.peak().bytes_of["activations"] for one in (on_gpu, on_cpu)]
    assert kept[0] < 0.9 * kept[1]


def test_streams_share_no_memory() -> None:
    trace = Trace(
        0, {}, held={"parameters": 100 * MIB}, category_of=dict.fromkeys(range(3), "temporary")
    )
    place = Site("", "forward")
    trace.events += [
        Allocation(0, 1000 * MIB, place),
        Allocation(0, 0, place),
        Allocation(1, 800 * MIB, place, stream=1),
        Allocation(2, 300 * MIB, place),
    ]
    assert trace.peak().num_bytes == 1200 * MIB
    # 100 MiB stay; each stream takes 20 MiB at a time.
    assert trace.reserved() == (100 + 1000 + 800) * MIB
    assert trace.gaps() == 0


def test_a_gap_that_fits_no_block_stays() -> None:
    """The gradients of a loss, in a line of addresses: the last fits none of the free parts."""
    allocator = Allocator()
    for block, size in enumerate((40, 80, 80, 20)):
        allocator.resize(block, size * MIB, 0)
    assert allocator.reserved == 220 * MIB
    allocator.resize(0, 0, 0)
    allocator.resize(1, 0, 0)
    # 120 MiB are free, of which one takes 80 and the next needs 60 more.
    allocator.resize(4, 80 * MIB, 0)
    allocator.resize(5, 60 * MIB, 0)
    assert allocator.reserved == (220 + 60) * MIB
    # What is freed becomes one part with its neighbours.
    for block in (2, 3, 4, 5):
        allocator.resize(block, 0, 0)
    allocator.resize(6, 280 * MIB, 0)
    assert allocator.reserved == 280 * MIB
    # Small blocks have a segment of their own, and another stream has its own too.
    allocator.resize(7, 600, 0)
    allocator.resize(8, 600, 1)
    assert allocator.reserved == (280 + 2 + 2) * MIB


def test_the_best_fitting_gap_is_taken_and_the_last_one_at_last() -> None:
    allocator = Allocator()
    for block, size in enumerate((60, 20, 40, 20, 20)):
        allocator.resize(block, size * MIB, 0)
    for block in (0, 2, 4):
        allocator.resize(block, 0, 0)
    # 60, 40 and at the end 20 are free.
    allocator.resize(5, 20 * MIB, 0)
    allocator.resize(6, 60 * MIB, 0)
    assert allocator.reserved == 160 * MIB
    allocator.resize(7, 20 * MIB, 0)
    allocator.resize(8, 30 * MIB, 0)
    assert allocator.reserved == 180 * MIB


def test_fsdp_reduces_gradients_on_a_stream_of_its_own() -> None:
    plan = job("cuda", training={"local_batch_size": 1}, data_parallel_shard_degree=2)
    trace = trace_rank(plan, 0)
    streams = {e.stream for e in trace.events if isinstance(e, Allocation) and e.num_bytes}
    assert len(streams) == 3
    assert trace.reserved() > trace.peak().num_bytes
    on_cpu = trace_rank(replace(plan, config=override(plan.config, {"job.device": "cpu"})), 0)
    assert {e.stream for e in on_cpu.events if isinstance(e, Allocation)} == {0}


PIPELINE = {"data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2}
SCHEDULE = "pipeline_parallel_schedule"
ONE_A_STAGE = {"pipeline_parallel_layers_per_stage": 1}
TWO_BATCHES = {"global_batch_size": 8}


@pytest.mark.parametrize(
    ("training", "plan", "limit"),
    [
        ({}, {**PIPELINE, SCHEDULE: "1F1B"}, 0.003),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (TWO_BATCHES, {"data_parallel_shard_degree": 4}, 0.001),
                (
                    TWO_BATCHES,
                    {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
                    0.001,
                ),
                ({}, {"data_parallel_replicate_degree": 2}, 0.001),
                ({"enable_cpu_offload": True}, {"data_parallel_shard_degree": 2}, 0.001),
                ({"mixed_precision_param": "float32"}, {**PIPELINE, SCHEDULE: "GPipe"}, 0.015),
                ({}, {**PIPELINE, SCHEDULE: "1F1B", "fsdp_reshard_after_forward": "always"}, 0.01),
                ({}, {**PIPELINE, SCHEDULE: "Interleaved1F1B", **ONE_A_STAGE}, 0.05),
                ({}, {"pipeline_parallel_degree": 2, SCHEDULE: "1F1B"}, 0.003),
                ({}, {**PIPELINE, SCHEDULE: "InterleavedZeroBubble"}, 0.15),
            )
        ),
    ],
)
def test_what_torch_takes_is_that_of_a_whole_trace(
    training: dict[str, Any], plan: dict[str, Any], limit: float
) -> None:
    """The peaks of all streams, within a `limit`, and with the allocator's gaps within 10 %."""
    model = {"dim": 1024, "n_heads": 8, "n_layers": 4, "vocab_size": 8192}
    size = 4 if "pipeline_parallel_degree" in plan else 1
    own = {"local_batch_size": size, "global_batch_size": -1, "seq_len": 512, **training}
    mode = "none" if plan.get(SCHEDULE) == "InterleavedZeroBubble" else "full"
    resolved = job("cuda", model, own, activation_checkpoint=mode, **plan)
    for composed in compose(resolved, trace_pieces(resolved)):
        trace = trace_rank(resolved, composed.rank)
        taken = trace.reserved(is_exact=True)
        of_streams = taken - trace.gaps()
        assert not composed.below_zero()
        assert composed.reserved() - composed.gaps == pytest.approx(of_streams, rel=limit)
        assert composed.reserved() == pytest.approx(taken, rel=0.1)


def test_a_step_takes_what_it_took_on_a_gpu() -> None:
    """A job of docs/gpu_checks.py: about 3 billion parameters, one sequence of 8,192 tokens."""
    of_gpu = json.loads((EVIDENCE / "measured.json").read_text())["10 blocks, all recomputed"]
    model = {"flavor": "8B", "n_layers": 10}
    training = {"seq_len": 8192, "global_batch_size": 1, "local_batch_size": 1}
    found = plan_job(job("cuda", model, activation_checkpoint="full", training=training))
    assert found.peak_bytes / 2**30 == pytest.approx(of_gpu["allocated"], rel=0.01)
    assert found.reserved_bytes / 2**30 == pytest.approx(of_gpu["reserved"], rel=0.01)


def test_pieces_of_contiguous_shards_are_those_of_the_last_rank() -> None:
    plan = {"context_parallel_degree": 2, "context_parallel_load_balancer": "none"}
    (block,) = trace_pieces(job("cuda", **plan)).blocks
    attention = [one for one in block.forward.events if getattr(one, "name", "") == ATTENTION]
    # The first rank attends to its own keys alone.
    assert [getattr(one, "causal", None) for one in attention] == [(1024, 1024), ()]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_causal_attention_has_its_lengths(device: str) -> None:
    found = [one for one in trace_rank(job(device), 0).operators if ATTENTION in one.name]
    assert {one.causal for one in found} == {(2048, 2048)}
    assert {one.name for one in found} == {ATTENTION, f"{ATTENTION}_backward"}


def test_a_part_of_each_row_has_gaps_and_a_repeated_row_has_none() -> None:
    torch = pytest.importorskip("torch")
    from titanlite.tools.planner.operators import has_gaps

    whole = torch.empty(4, 6)
    assert not any(map(has_gaps, (whole, whole.t(), whole[1:3], whole[0].expand(3, 6))))
    assert not has_gaps(torch.empty(0, 3))
    assert all(map(has_gaps, (whole[:, :3], whole[:, ::2], whole[::2])))
