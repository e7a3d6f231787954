"""What to do next: what it says of a changed job is what a plan of that job says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import titanlite
from titanlite.quantities import format_bytes
from titanlite.tools.planner.planning import Advice

MODEL = {"dim": 4096, "n_layers": 2, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32768}
TRAINING = {"dataset": "synthetic", "seq_len": 4096, "mixed_precision_param": "bfloat16"}
MODE, TP = "activation_checkpoint.mode", "parallelism.tensor_parallel_degree"


def job(parallelism: dict[str, int], mode: str = "none") -> dict[str, Any]:
    """A job of so many ranks that it is composed."""
    return {
        "job": {"device": "cuda"},
        "model": {"name": "llama3", **MODEL},
        "training": {"global_batch_size": 1024, "local_batch_size": 2, **TRAINING},
        "parallelism": {"data_parallel_shard_degree": 512, **parallelism},
        "activation_checkpoint": {"mode": mode},
    }


def device(folder: Path, gib: float, per_node: int = 8) -> str:
    """The file of an H100 with other memory and nodes."""
    path = folder / "device.toml"
    own = f"[memory]\nnum_bytes = {gib * 2**30}\n[node]\nnum_ranks = {per_node}\n"
    path.write_text(f'base = "h100"\n{own}')
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def planned(given: dict[str, Any], hardware: str) -> list[Advice]:
    """What is advised, after each changed job is planned again."""
    result = titanlite.plan(given, hardware=hardware)
    assert 0 < len(result.advice) <= 3
    for one in result.advice:
        if "compile.enable" in one.changes:
            # Its blocks would be traced, which takes long.
            continue
        again = titanlite.plan(given, hardware=hardware, changes=one.changes)
        assert again.step_seconds == pytest.approx(one.seconds)
        assert again.plan.device_bytes == one.device_bytes
        assert not any("fit" in warning for warning in again.plan.warnings)
        assert f"and a rank {format_bytes(one.device_bytes)}" in one.text
        assert " ".join(one.text.split()) in " ".join(str(result).split())
    return result.advice


def test_what_does_not_fit_gets_changes_that_do(tmp_path: Path) -> None:
    found = planned(job({}), device(tmp_path, 5.5))
    assert any(MODE in one.changes for one in found)
    for one in found:
        assert re.fullmatch("memory is .*: with .*, a step takes .*, which fits", one.text)


def test_nothing_is_recomputed_without_need(tmp_path: Path) -> None:
    found = planned(job({}, "full"), device(tmp_path, 80))
    (one,) = (one for one in found if MODE in one.changes)
    assert one.changes == {MODE: "none"}
    assert re.fullmatch("[0-9]+% of all operations are recomputed", one.why)
    assert all("which fits" not in one.text for one in found)


@pytest.mark.slow
def test_tp_stays_in_a_node(tmp_path: Path) -> None:
    given = job({"data_parallel_shard_degree": 128, "tensor_parallel_degree": 4})
    found = planned(given, device(tmp_path, 80, per_node=2))
    (one,) = (one for one in found if TP in one.changes)
    assert one.changes[TP] == 2
    assert one.why.startswith("tp spans nodes, and is exposed for ")


def test_an_idle_pipeline_gets_another_schedule(tmp_path: Path) -> None:
    given = job({"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2})
    given["training"] |= {"local_batch_size": 4, "global_batch_size": 2048}
    one, *_ = planned(given, device(tmp_path, 200))
    assert one.changes["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert one.why.startswith("the pipeline's ranks are idle for ")


def test_where_nothing_helps_nothing_is_said(tmp_path: Path) -> None:
    for hardware in (device(tmp_path, 1), "cpu"):
        assert titanlite.plan(job({}), hardware=hardware).figures["next"] == []
