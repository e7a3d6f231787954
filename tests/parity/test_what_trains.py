"""The table of jobs and plans in docs/what_trains.md: each cell agrees, or is refused as it says.

`python tests/parity/test_what_trains.py` verifies all and prints the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf import OF_BLOCKS, SCORED, TOKENS, job
from training import merged

from titanlite.config import JobConfig, parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.registry import MODELS
from titanlite.tools.planner.planning import PIECES, WHOLE, plan_job
from titanlite.tools.verify.verify import Verification, Verifier

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = ("clip", "dit", "seq2seq", "vit")
PLANS = {
    "tp 2": {"tensor_parallel": 2},
    "fsdp 2": {"data_parallel_shard": 2},
    "tp 2 x fsdp 2": {"tensor_parallel": 2, "data_parallel_shard": 2},
    "cp 2": {"context_parallel": 2},
    "pp 2": {"pipeline_parallel": 2},
    "ep 2 (x fsdp 2)": {"data_parallel_shard": 2, "expert_parallel": 2},
}
Plan = dict[str, int]


def own(**sections: Any) -> Callable[[Plan], JobConfig]:
    """A mixture of experts of titanlite."""
    base: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": "moe_debug", "n_layers": 2},
        "training": {"dataset": "synthetic", "seq_len": 32, "global_batch_size": 16},
    }
    return lambda plan: JobConfig.from_dict(merged(base, sections, {"parallelism": plan}))


def of_transformers(config_class: str, **values: Any) -> Callable[[Plan], JobConfig]:
    sizes = {**OF_BLOCKS, **SCORED}.get(config_class, {})
    values = {**TOKENS, "num_hidden_layers": 2, **sizes, **values}
    return lambda plan: JobConfig.from_dict(job(config_class, plan, **values))


def example(name: str) -> Callable[[Plan], JobConfig]:
    def make(plan: Plan) -> JobConfig:
        if name not in MODELS:  # what it has registered is gone after each test
            sys.modules.pop(name, None)
        keys: dict[str, Any] = {f"parallelism.{key}": value for key, value in plan.items()}
        if name == "clip":
            size = 16 // plan["data_parallel_shard_degree"]
            keys |= {f"{section}.local_batch_size": size for section in ("training", "validation")}
        words = [f"--{key}={value}" for key, value in keys.items()]
        file = DOCS / f"examples/{name}/{name}.toml"
        return parse_args([f"--job.config_file={file}", *words])

    return make


JOBS = {
    "AdamW": own(),
    "Muon": own(optimizer={"name": "Muon"}),
    "average of the weights": own(weight_averaging={"method": "ema", "decay": 0.9}),
    "label smoothing, z-loss": own(training={"label_smoothing": 0.1, "z_loss": 1e-3}),
    "LoRA": own(lora={"rank": 4}),
    "Qwen3 (hf)": of_transformers("Qwen3Config", head_dim=16),
    "Gemma 3 (hf)": of_transformers("Gemma3TextConfig"),
    "Mixtral (hf)": of_transformers("MixtralConfig"),
    "Qwen3-MoE (hf)": of_transformers("Qwen3MoeConfig"),
    "gpt-oss (hf)": of_transformers("GptOssConfig"),
    "DeepSeek-V3 (hf)": of_transformers("DeepseekV3Config"),
    "[ViT](examples/vit)": example("vit"),
    "[DiT](examples/dit)": example("dit"),
    "[encoder-decoder](examples/seq2seq)": example("seq2seq"),
    "[CLIP](examples/clip)": example("clip"),
}


def plan_of(name: str) -> Plan:
    degrees = {"data_parallel_shard": 1, **PLANS[name]}
    return {f"{axis}_degree": degree for axis, degree in degrees.items()}


def page() -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """The cells of the page's table, and the lines below it by their number."""
    text = (DOCS / "what_trains.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    cells = {
        (row[0], plan): cell for row in body for plan, cell in zip(head[1:], row[1:], strict=True)
    }
    return cells, dict(re.findall(r"^\[(\d)\] `(.*)`$", text, re.MULTILINE))


def largest(found: Verification) -> float:
    return max(value for step in found.differences for value in step.values())


@pytest.fixture(scope="module")
def verifying() -> Iterator[Verifier]:
    pytest.importorskip("transformers", "5")
    folders = [str(DOCS / "examples" / name) for name in EXAMPLES]
    sys.path[:0] = folders
    try:
        with Verifier(timeout_seconds=200) as verifier:
            yield verifier
    finally:
        for folder in folders:
            sys.path.remove(folder)


CELLS, REFUSALS = page()
COMPOSED = ("tp 2 x fsdp 2", "pp 2", "ep 2 (x fsdp 2)")
QUICK = ("[encoder-decoder](examples/seq2seq)", "cp 2")


def test_the_table_has_each_job_under_each_plan_and_examples_are_short() -> None:
    assert list(CELLS) == [(name, plan) for name in JOBS for plan in PLANS]
    for name in EXAMPLES:
        (file,) = (DOCS / "examples" / name).rglob("*.py")
        assert len(file.read_text().splitlines()) <= 100, file


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(*cell, marks=[] if cell == QUICK or "[" in said else pytest.mark.slow)
        for cell, said in CELLS.items()
    ],
)
def test_a_cell_of_the_table(verifying: Verifier, name: str, plan: str) -> None:
    said = CELLS[name, plan]
    if said.startswith("["):
        with pytest.raises(ConfigError) as refused:
            JOBS[name](plan_of(plan))
        assert refused.value.problems[0].startswith(REFUSALS[said.strip("[]")])
        return
    if "seq2seq" in name and torch.__version__ < (2, 12):
        pytest.skip("in its FSDP, a table of two in a unit cannot be used twice")
    found = verifying.verify(JOBS[name](plan_of(plan)), steps=2)
    assert found.agrees, found.findings
    assert largest(found) < 10 * float(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [cell for cell, said in CELLS.items() if cell[1] in COMPOSED and "[" not in said],
)
def test_the_memory_of_a_cell_is_planned(verifying: Verifier, name: str, plan: str) -> None:
    resolved = resolve_job(JOBS[name](plan_of(plan)))
    plans = (plan_job(resolved, method=one, use_cache=False) for one in (PIECES, WHOLE))
    for composed, traced in zip(*(one.ranks for one in plans), strict=True):
        assert composed.peak.num_bytes == pytest.approx(traced.peak.num_bytes, rel=0.03)


def main() -> None:
    """Print the table and the lines below it."""
    sys.path[:0] = [str(DOCS / "examples" / name) for name in EXAMPLES]
    lines: dict[str, int] = {}
    with Verifier(timeout_seconds=200) as verifier:
        for name, make in JOBS.items():
            row = [name]
            for plan in PLANS:
                try:
                    found = verifier.verify(make(plan_of(plan)), steps=2)
                    row.append(f"{largest(found):.0e}" if found.agrees else found.findings[0])
                except ConfigError as error:
                    said = error.problems[0]
                    row.append(f"[{lines.setdefault(said, len(lines) + 1)}]")
            print("|", " | ".join(row), "|", flush=True)
    for said, number in lines.items():
        print(f"\n[{number}] `{said}`")


if __name__ == "__main__":
    main()
