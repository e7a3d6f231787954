"""A step put together from traced pieces equals the trace of the whole step."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from titanlite.config import JobConfig, ResolvedJob, parse_args, resolve_job
from titanlite.config.load import override
from titanlite.errors import ConfigError
from titanlite.modules.device_support import DeviceSupport
from titanlite.tools.planner import fake_world, pieces
from titanlite.tools.planner.cache import folder, known_pieces, load_applied, load_pieces
from titanlite.tools.planner.compose import Composition, compose
from titanlite.tools.planner.composition import TraceError
from titanlite.tools.planner.events import Operator, Trace
from titanlite.tools.planner.pieces import trace_pieces
from titanlite.tools.planner.planning import PIECES, plan_job, plannable
from titanlite.tools.planner.segments import P2P, Shared
from titanlite.tools.planner.trace import trace_rank

CONFIGS = Path(__file__).parents[4] / "configs"
QUICK = ("pp2_fsdp2", "float8")
# cifar10 needs its data set.
SLOW = sorted({path.stem for path in CONFIGS.glob("*.toml")} - {*QUICK, "cifar10"})


P = "--parallelism."
# Of moe_ep4.
EXPERTS = {
    "tp2 x fsdp4, ep4, bfloat16": (
        *(f"{P}tensor_parallel_degree=2", f"{P}expert_parallel_degree=4"),
        *("--training.mixed_precision_param=bfloat16", "--model.moe_capacity_factor=1.5"),
    ),
    "tp2, not cut": (
        *(f"{P}tensor_parallel_degree=2", f"{P}data_parallel_shard_degree=1"),
        f"{P}expert_parallel_degree=1",
    ),
    "cp2 x fsdp2, ep4": (
        *(f"{P}context_parallel_degree=2", f"{P}data_parallel_shard_degree=2"),
        "--model.flavor=moe_debug",
    ),
    "hsdp2x4, ep2, full recomputation": (
        *(f"{P}data_parallel_replicate_degree=2", f"{P}expert_parallel_degree=2"),
        *("--training.global_batch_size=32", "--activation_checkpoint.mode=full"),
    ),
    "pp2 x fsdp4, ep2": (
        *(f"{P}pipeline_parallel_degree=2", f"{P}expert_parallel_degree=2"),
        *("--model.flavor=moe_debug", f"{P}pipeline_parallel_schedule=Interleaved1F1B"),
    ),
}
# Of float8, whose weights are gathered in float8.
G, BF16 = "--quantize.linear.float8.", "--training.mixed_precision_param=bfloat16"
FLOAT8 = {
    "interleaved pipeline": (
        *(f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_schedule=Interleaved1F1B"),
        f"{P}pipeline_parallel_microbatch_size=8",
    ),
    "scales not precomputed, fsdp4, bfloat16": (
        *(f"{P}data_parallel_shard_degree=4", f"{P}fsdp_reshard_after_forward=never", BF16),
        f"{G}precompute_float8_dynamic_scale_for_fsdp=false",
        "--training.local_batch_size=16",
    ),
    "hsdp2 x cp2, bfloat16, on a GPU": (
        *(f"{P}context_parallel_degree=2", f"{P}data_parallel_replicate_degree=2", BF16),
        *(f"{P}tensor_parallel_degree=1", "--training.global_batch_size=128"),
        "--job.device=cuda",
    ),
    "replicas of ddp": (
        *(f"{P}data_parallel_replicate_degree=2", f"{P}data_parallel_shard_degree=1"),
        *(f"{P}tensor_parallel_degree=1", f"{G}enable_fsdp_float8_all_gather=false"),
        f"{G}precompute_float8_dynamic_scale_for_fsdp=false",
    ),
}


# Schedules that split the backward pass; with the dtypes and layers that change what it keeps.
SCHEDULE = f"{P}pipeline_parallel_schedule="
SPLIT = {
    "joined products": ("llama_tiny", f"{P}pipeline_parallel_degree=2", f"{SCHEDULE}ZBVZeroBubble"),
    "recomputation": (
        *("llama_tiny", f"{P}pipeline_parallel_degree=2", f"{SCHEDULE}ZBVZeroBubble"),
        "--activation_checkpoint.mode=full",
    ),
    "biases, a tied head": ("gpt2_pp2_tp2", f"{SCHEDULE}ZBVZeroBubble"),
    "bfloat16, tp": ("pp2_tp2_fsdp2", f"{SCHEDULE}InterleavedZeroBubble", BF16),
    "bfloat16, cp": ("llama_pp2_cp2", f"{SCHEDULE}DualPipeV", BF16),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", SPLIT)
def test_composed_steps_with_a_split_backward_pass_equal_traced_ones(plan: str) -> None:
    check(*SPLIT[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", FLOAT8)
def test_all_composed_float8_steps_equal_traced_ones(plan: str) -> None:
    check("float8", *FLOAT8[plan])


def test_composed_experts_equal_traced_ones() -> None:
    (first, *_) = EXPERTS
    check("moe_ep4", *EXPERTS[first])


@pytest.mark.parametrize(
    "plan", [pytest.param((), marks=pytest.mark.slow), (f"{P}tensor_parallel_degree=2",)]
)
def test_composed_experts_of_transformers_equal_traced_ones(
    tmp_path: Path, plan: tuple[str, ...]
) -> None:
    pytest.importorskip("transformers", "5")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"vocab_size": 257, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    model = "--model.name=hf", "--model.flavor=config", f"--model.path={tmp_path}"
    check("moe_ep4", *model, *plan)


# Their blocks need no input for the backward pass: when it is freed is up to the code around them.
@pytest.mark.parametrize(
    ("pp", "mode"),
    [(1, "selective"), *(pytest.param(2, m, marks=pytest.mark.slow) for m in ("none", "full"))],
)
def test_composed_bfloat16_steps_of_transformers_equal_traced_ones(
    tmp_path: Path, pp: int, mode: str
) -> None:
    pytest.importorskip("transformers", "5")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    model = "--model.name=hf", "--model.flavor=config", f"--model.path={tmp_path}", BF16
    plan = f"{P}tensor_parallel_degree=2", f"{P}data_parallel_shard_degree=2"
    pipeline = f"{P}pipeline_parallel_degree={pp}", f"{P}expert_parallel_degree=1"
    check("moe_ep4", *model, *plan, *pipeline, f"--activation_checkpoint.mode={mode}")


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(EXPERTS)[1:])
def test_all_composed_experts_equal_traced_ones(plan: str) -> None:
    check("moe_ep4", *EXPERTS[plan])


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param((), marks=pytest.mark.slow),
        (f"{P}data_parallel_shard_degree=4", f"{P}expert_parallel_degree=2"),
    ],
)
def test_composed_updates_of_muon_equal_traced_ones(plan: tuple[str, ...]) -> None:
    check("moe_ep4" if plan else "tp2_fsdp2", "--optimizer.name=Muon", *plan)


def test_averages_of_the_weights_are_optimizer_state() -> None:
    check("tp2_fsdp2", "--weight_averaging.method=last_k", "--weight_averaging.k=2")


@pytest.mark.parametrize("name", QUICK)
def test_composed_steps_equal_traced_ones(name: str) -> None:
    check(name)


def test_a_composed_step_that_recomputes_every_third_block_equals_a_traced_one() -> None:
    check("ac", "--model.num_layers=7", "--activation_checkpoint.selective_ac_option=3")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_all_composed_steps_equal_traced_ones(name: str, tmp_path: Path) -> None:
    resolved, trace = check(name)
    # The effective plan of a rank is made without a trace; the second time it is read.
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert load_applied(resolved) == trace.applied
        patches.setattr("titanlite.tools.planner.trace.applied_plan", None)
        assert load_applied(resolved) == trace.applied


def test_stages_have_their_own_weights_and_an_output_for_each_microbatch_in_flight() -> None:
    sharded = f"{P}tensor_parallel_degree=1", f"{P}data_parallel_shard_degree=4"
    check("gpt2_pp2_tp2", *sharded, "--training.global_batch_size=32", f"{SCHEDULE}GPipe")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [64, 256, 1024])
@pytest.mark.parametrize("seed", range(6))
def test_composed_steps_of_random_jobs_equal_traced_ones(seed: int, num_ranks: int) -> None:
    draw = random.Random(f"job {seed} of {num_ranks}")
    for _ in range(50):
        try:
            config = plannable(JobConfig.from_dict(random_job(draw, num_ranks)))[0]
            resolved = resolve_job(config)
            break
        except ConfigError:
            continue
    assert resolved.dims.world_size == num_ranks
    limit = 0.03
    if (pipeline := resolved.pipeline) is not None:
        keeps = config.activation_checkpoint.mode == "none"
        limit = (0.1 if keeps else 0.2) if pipeline.schedule.splits_backward else 0.05
    check_job(resolved, limit)


MODELS: tuple[dict[str, object], ...] = (
    {"name": "llama3", "dim": 256, "n_heads": 16, "n_kv_heads": 8, "vocab_size": 512},
    {"name": "llama3", "flavor": "moe_debug"},
    {"name": "gpt2", "flavor": "tiny"},
)
SCHEDULES = "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"


def random_job(draw: random.Random, num_ranks: int) -> dict[str, dict[str, object]]:
    """The values of a job on `num_ranks`, a power of 2; not all are legal."""
    left, degrees = num_ranks, {}
    for axis, most in draw.sample([("pipeline", 4), ("tensor", 8), ("context", 2)], 3):
        degree = draw.choice([d for d in (1, 2, 4, 8) if d <= min(left, most)])
        degrees[f"{axis}_parallel_degree"], left = degree, left // degree
    replicas = draw.choice([1, 2, left]) if left > 1 else 1
    shards = {"replicate": replicas, "shard": left // replicas}
    model = draw.choice(MODELS)
    experts = 2 ** draw.randrange(4) if "moe" in str(model) else 1
    is_piped = degrees["pipeline_parallel_degree"] > 1
    local = draw.choice([4, 8] if is_piped else [1, 2])
    piped = {
        "pipeline_parallel_schedule": draw.choice(SCHEDULES),
        "pipeline_parallel_microbatch_size": local // 4,
    }
    return {
        "job": {"device": draw.choice(["cpu", "cuda"])},
        "model": {**model, "n_layers": 8},
        "training": {
            "dataset": "synthetic",
            "seq_len": 128,
            "local_batch_size": local,
            "global_batch_size": local * left * draw.choice([1, 1, 2]),
            "mixed_precision_param": draw.choice(["float32", "bfloat16"]),
        },
        "parallelism": {
            **degrees,
            **{f"data_parallel_{name}_degree": degree for name, degree in shards.items()},
            **(piped if is_piped else {}),
            "expert_parallel_degree": experts,
            "fsdp_reshard_after_forward": draw.choice(["default", "always", "never"]),
        },
        "activation_checkpoint": {"mode": draw.choice(["none", "selective", "full"])},
        "optimizer": {"name": draw.choice(["AdamW", "Muon"])},
    }


def check(name: str, *changes: str) -> tuple[ResolvedJob, Trace]:
    config, _ = plannable(parse_args([f"--job.config_file={CONFIGS / name}.toml", *changes]))
    resolved = resolve_job(config)
    limit = 0.01
    if (pipeline := resolved.pipeline) is not None:
        limit = 0.06 if pipeline.schedule.splits_backward else 0.035
        if limit == 0.06 and config.activation_checkpoint.mode != "none":
            limit = 0.2
    return check_job(resolved, limit)


def check_job(resolved: ResolvedJob, limit: float) -> tuple[ResolvedJob, Trace]:
    """Communication, FLOPs and what is held are equal; peaks differ by rounding of the parts.

    A peak is hardly ever too low. Returns the job and the trace of its first rank.
    """
    config = resolved.config
    traced = trace_pieces(resolved, is_compiled=True)
    composed = compose(resolved, traced)
    of_three = override(config, {"training.global_batch_size": 3 * resolved.global_batch_size})
    for one in [*composed, *compose(resolve_job(of_three), traced)]:
        check_categories(one)
    for one in {len(composed) - 1: composed[-1], 0: composed[0]}.values():
        trace = trace_rank(resolved, one.rank)
        assert one.totals() == trace.totals()
        assert one.flops == trace.flops
        for category in ("parameters", "optimizer state"):
            assert one.held[category] == trace.held[category]
        difference = one.peak().num_bytes / trace.peak().num_bytes - 1
        assert -min(limit, 0.035) < difference < limit
    return resolved, trace


def check_categories(one: Composition) -> None:
    """No category of memory is ever negative, and at the peak they add up to the most there is."""
    now, most = Counter(one.held), 0
    for segment in (done.segment for done in one.actions):
        changes = [*segment.peak.items(), *segment.net.items()]
        assert all(now[category] + num_bytes >= 0 for category, num_bytes in changes)
        most = max(most, now.total() + segment.peak_bytes)
        now.update(segment.net)
    assert one.peak().num_bytes == most


def test_a_trace_runs_three_chunks_of_a_loss_and_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "--model.name=llama3", "--model.flavor=8B", "--model.n_layers=1"
    keys = *model, "--training.dataset=synthetic", "--training.seq_len=1000", "--training.z_loss=1"
    resolved = resolve_job(parse_args([f"--job.config_file={CONFIGS / 'tp2_fsdp2.toml'}", *keys]))
    found = []
    for _ in range(2):
        trace = trace_rank(resolved, 0)
        found.append(([e for e in trace.events if isinstance(e, Operator)], trace.peak()))
        monkeypatch.setattr(fake_world.FewChunks, "chunks", DeviceSupport.chunks)
    few, every = found
    assert few == every
    assert len({*map(id, few[0])}) < len({*map(id, every[0])}) / 2


def test_segments_live_as_long_as_their_times() -> None:
    resolved = resolve_job(parse_args([f"--job.config_file={CONFIGS / 'pp2_interleaved.toml'}"]))
    shared = Shared()
    composed = compose(resolved, load_pieces(resolved), shared=shared)
    kept = {id(segment) for segment in shared.segments.values()}
    timed = {id(d.segment) for one in composed for d in one.actions if d.kind not in P2P}
    assert timed <= kept


def test_a_cache_that_cannot_be_written_or_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve_job(parse_args([f"--job.config_file={CONFIGS / 'single.toml'}"]))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    traced = load_pieces(resolved)
    assert known_pieces(resolved) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_pieces(resolved) == traced == known_pieces(resolved)
    (stored,) = folder().iterdir()
    stored.write_bytes(b"half a fi")
    assert known_pieces(resolved) is None


def test_a_plan_says_what_a_split_backward_pass_repeats() -> None:
    config = parse_args(
        [
            f"--job.config_file={CONFIGS / 'pp2_fsdp2.toml'}",
            *(f"{SCHEDULE}ZBVZeroBubble", "--activation_checkpoint.mode=full"),
        ]
    )
    (note,) = plan_job(resolve_job(config), method=PIECES, use_cache=False).notes
    assert note.startswith("schedule: it splits the backward pass, and PyTorch recomputes a block")
    one = override(config, {"activation_checkpoint.mode": "none"})
    assert plan_job(resolve_job(one), method=PIECES, use_cache=False).notes == []


def test_only_a_job_that_fails_on_fake_tensors_cannot_be_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = resolve_job(parse_args([f"--job.config_file={CONFIGS / 'single.toml'}"]))

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a value\nis needed")

    with monkeypatch.context() as patches:
        patches.setattr(pieces, "trace_job", fail)
        with pytest.raises(TraceError, match=r"model.name: .* \(ValueError: a value is"):
            trace_pieces(resolved)
    # An error of the planner keeps its kind.
    monkeypatch.setattr(pieces, "smaller", fail)
    with pytest.raises(ValueError, match="is needed"):
        trace_pieces(resolved)


def test_a_composed_step_casts_no_reduced_shard_of_the_traced_size() -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        training = {"dataset": "synthetic", "seq_len": 64, "mixed_precision_param": "bfloat16"}
        values = {
            "model": {"name": "gpt2", "flavor": "tiny"},
            "training": {**training, "mixed_precision_reduce": dtype},
            "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
        }
        resolved = resolve_job(JobConfig.from_dict(values))
        (composed,) = compose(resolved, load_pieces(resolved))
        events = [event for done in composed.actions for event in done.segment.events]
        found.append(sum(getattr(event, "name", "") == "aten::_to_copy" for event in events))
    assert found[0] == found[1] > 0
