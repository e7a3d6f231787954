"""A step put together from traced pieces equals the trace of the whole step."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config import load_config, resolve_job
from titanlite.config.load import override
from titanlite.plan.cache import folder, known_pieces, load_pieces
from titanlite.plan.command import plannable
from titanlite.plan.compose import compose
from titanlite.plan.composition import WITHOUT_FLOAT8_GATHER, gathers_in_float8
from titanlite.plan.events import totals
from titanlite.plan.pieces import trace_pieces
from titanlite.plan.trace import trace_rank

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = ("tp2_fsdp2", "ac", "pp2_fsdp2", "gpt2_pp2_tp2")
# Pieces are of eager code, which keeps what a compiled block computes again.
TOLERANCE = {"compile": 0.3}
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


def test_composed_experts_equal_traced_ones() -> None:
    (first, *_) = EXPERTS
    check("moe_ep4", *EXPERTS[first])


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(EXPERTS)[1:])
def test_all_composed_experts_equal_traced_ones(plan: str) -> None:
    check("moe_ep4", *EXPERTS[plan])


@pytest.mark.parametrize("name", QUICK)
def test_composed_steps_equal_traced_ones(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_all_composed_steps_equal_traced_ones(name: str) -> None:
    check(name)


def check(name: str, *changes: str) -> None:
    """Communication, FLOPs and what is held are equal; peaks differ by rounding of the parts."""
    config, _ = plannable(load_config([f"--job.config_file={CONFIGS / name}.toml", *changes]))
    if gathers_in_float8(config):
        config = override(config, WITHOUT_FLOAT8_GATHER)
    resolved = resolve_job(config)
    composed = compose(resolved, trace_pieces(resolved))
    for one in {0: composed[0], len(composed) - 1: composed[-1]}.values():
        trace = trace_rank(resolved, one.rank)
        assert one.totals() == totals(trace.communications)
        assert one.flops == trace.flops
        for category in ("parameters", "optimizer state"):
            assert one.held[category] == trace.held[category]
        difference = one.peak().num_bytes / trace.peak().num_bytes - 1
        assert abs(difference) < TOLERANCE.get(name, 0.06)


def test_a_cache_that_cannot_be_written_or_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve_job(load_config([f"--job.config_file={CONFIGS / 'single.toml'}"]))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    traced = load_pieces(resolved)
    assert known_pieces(resolved) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_pieces(resolved) == traced == known_pieces(resolved)
    (stored,) = folder().iterdir()
    stored.write_bytes(b"half a fi")
    assert known_pieces(resolved) is None
