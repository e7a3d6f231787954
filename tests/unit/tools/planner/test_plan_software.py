"""What [software] changes of a traced block, on events worked out by hand."""

from dataclasses import replace
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.composition import ModelPart, Pieces, Segment
from titanlite.tools.planner.events import Communication, Event, Operator, Site, Wait
from titanlite.tools.planner.hardware import Software
from titanlite.tools.planner.planning import passes
from titanlite.tools.planner.software import on_software

MLP, NORM = (Site(f"layers.1.{name}", "forward") for name in ("w", "ffn_norm"))
LLAMA = {"name": "llama3", "flavor": "debugmodel", "n_heads": 16, "n_kv_heads": 4}


def product(flops: int, rows: int) -> Operator:
    return Operator("aten::mm", flops, 800, 80, MLP, "bfloat16", (1, rows, 8, 8))


def on(software: Software, events: list[Event], **degrees: int) -> list[Event]:
    """The events of the forward pass of a block of a job with these degrees."""
    parallelism = {f"{name}_parallel_degree": n for name, n in degrees.items()}
    config = JobConfig.from_dict({"model": LLAMA, "parallelism": parallelism})
    part = ModelPart(Segment(tuple(events), {}, {}), Segment((), {}, {}), {}, 0)
    values: dict[str, Any] = dict.fromkeys(Pieces.__dataclass_fields__)
    pieces = Pieces(**{**values, "blocks": (part,)})
    (changed,) = on_software(pieces, software, resolve_job(config)).blocks
    return list(changed.forward.events)


def test_a_gather_moves_in_parts_while_parts_of_its_largest_product_run() -> None:
    gather = Communication("all_gather", "tp", 4000, 4, MLP, 7)
    small, large = product(64, 4), product(640, 40)
    found = on(Software(fuses_tp=True), [gather, Wait(7), small, large], tensor=4)
    part = replace(large, flops=160, bytes_read=200, bytes_written=20, shape=(1, 10, 8, 8))
    messages = [
        replace(gather, kind="receive", num_bytes=1000, number=n, peer=1) for n in (8, 9, 10)
    ]
    steps = [event for one in messages for event in (one, part, Wait(one.number))]
    assert found == [small, part, *steps]


def test_a_reduction_moves_with_the_product_before_it_and_is_summed() -> None:
    reduce = Communication("reduce_scatter", "tp", 4000, 4, MLP, 7)
    found = on(Software(fuses_tp=True), [product(640, 40), reduce, Wait(7)], tensor=4)
    assert [getattr(event, "name", "") for event in found[:2]] == ["aten::mm", ""]
    last = found[-1]
    assert isinstance(last, Operator)
    assert (last.name, last.flops, last.bytes_read, last.bytes_written) == (
        *("aten::sum", 0, 4000, 1000),
    )
    other = Communication("all_reduce", "tp", 8, 4, MLP, 7)
    assert on(Software(fuses_tp=True), [other, Wait(7)], tensor=4) == [other, Wait(7)]


def test_without_sequence_parallelism_norms_read_all_of_it_and_weights_can_be_joined() -> None:
    norm, joined = (Operator(f"aten::{n}", 0, 4, 2, NORM, "float32") for n in ("norm", "cat"))
    events: list[Event] = [norm, joined, product(64, 4)]
    old = Software(sequence_parallel=False, joins_weights=False)
    whole = replace(norm, bytes_read=16, bytes_written=8)
    assert on(old, events, tensor=4) == [whole, product(64, 4)]
    assert on(Software(rms_norm="composed"), events, tensor=4) == events


def test_a_composed_rms_norm_reads_and_keeps_more() -> None:
    job = {"model": LLAMA, "job": {"device": "cuda"}, "activation_checkpoint": {"mode": "none"}}
    training = {"dataset": "synthetic", "seq_len": 64, "mixed_precision_param": "bfloat16"}
    resolved = resolve_job(JobConfig.from_dict({**job, "training": training}))
    pieces = (load_pieces(resolved, Software(rms_norm=one)) for one in ("fused", "composed"))
    fused, composed = (one.blocks[-1].forward for one in pieces)
    assert len(composed.events) > len(fused.events)
    assert composed.net["activations"] > fused.net["activations"]


def test_all_stages_of_a_rank_count_in_whether_a_job_is_composed() -> None:
    model = {"name": "llama3", "flavor": "debugmodel", "n_layers": 6}
    found = []
    for schedule, blocks in (("1F1B", 4), ("Interleaved1F1B", 2)):
        keys = {"degree": 2, "schedule": schedule, "layers_per_stage": blocks}
        parallelism = {f"pipeline_parallel_{name}": value for name, value in keys.items()}
        config = JobConfig.from_dict({"model": model, "parallelism": parallelism})
        found.append(passes(resolve_job(config)))
    # Eight microbatches on two ranks, with one stage of at most 5 modules or two of at most 3.
    assert found == [8 * 2 * 5, 8 * 2 * 2 * 3]
