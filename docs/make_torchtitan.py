"""Verifies the jobs and plans of the table in evidence/torchtitan.md, and writes the table.

What it says of each row is in evidence/runs/torchtitan_models.json.

python docs/make_torchtitan.py            # all rows, each in a process of its own
python docs/make_torchtitan.py gpt_oss    # new rows, and those with this in their name or plan
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("evidence") / "torchtitan.md"
ROWS_OF = PAGE.with_name("runs") / "torchtitan_models.json"
HEAD = "| job | plans | verdict |\n| --- | --- | --- |\n"
AGREES = "agrees to "
USUAL = "spmd_types"
"""The backend that no row names."""

DEGREES = {
    "tp": "tensor_parallel",
    "fsdp": "data_parallel_shard",
    "hsdp": "data_parallel_replicate",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
}
NO_GRAPHS = "--training.disable_cuda_graphs"
WITHOUT_AC = ("activation-checkpoint:none",)
COMPILED = ("--compile.enable", "--compile.backend=aot_eager", *WITHOUT_AC)
PARTIAL = ("--parallelism.spmd_backend=partial_dtensor",)
FULL = ("--parallelism.spmd_backend=full_dtensor",)

ROWS: list[tuple[str, str, tuple[str, ...]]] = [
    *(
        (job, plan, ())
        for job in ("llama3_debugmodel", "qwen3_debugmodel", "deepseek_v3_debugmodel")
        for plan in ("tp 2", "fsdp 2", "tp 2 x fsdp 2")
    ),
    ("llama3_debugmodel", "hsdp 2 x fsdp 2", ()),
    ("llama3_debugmodel", "pp 2", (NO_GRAPHS,)),
    ("llama3_debugmodel", "cp 2", ()),
    ("llama3_debugmodel", "pp 2 x tp 2 x fsdp 2", (NO_GRAPHS,)),
    ("llama3_debugmodel", "tp 2", ("activation-checkpoint:full",)),
    ("llama3_debugmodel", "tp 2", COMPILED),
    ("llama3_debugmodel", "tp 2 x fsdp 2", PARTIAL),
    ("llama3_debugmodel", "tp 2 x fsdp 2", FULL),
    ("llama3_debugmodel_varlen_attn", "tp 2", ()),
    ("llama3_debugmodel_float8_emulate_lora", "fsdp 2", ()),
    ("qwen3_moe_debug", "ep 2", (NO_GRAPHS,)),
    ("deepseek_v3_debugmodel", "ep 2", (NO_GRAPHS,)),
    ("deepseek_v3_debugmodel", "tp 2 x ep 2", (NO_GRAPHS,)),
    ("deepseek_v3_debugmodel", "pp 2", (NO_GRAPHS,)),
    ("deepseek_v3_debugmodel_mtp", "fsdp 2", ()),
    ("kimi_k2_5_debugmodel", "fsdp 2", ()),
    ("kimi_k2_5_debugmodel", "ep 2", ()),
    ("gpt_oss_debugmodel", "fsdp 2", ()),
    ("gpt_oss_debugmodel", "ep 2", (NO_GRAPHS,)),
    ("gpt_oss_debugmodel", "tp 2", ()),
    ("gpt_oss_debugmodel", "tp 2", PARTIAL),
    ("muse_glimmer_debugmodel", "tp 2", ()),
    ("llama3_debugmodel_dist_gemm", "tp 2", ()),
]


def main(chosen: str = "") -> None:
    known = {(one["job"], one["plan"]): one for one in json.loads(ROWS_OF.read_text())}
    found = []
    for row in ROWS:
        before = known.get((row[0], ", ".join(words_of(*row[1:]))))
        if before is None or chosen in " ".join((row[0], row[1], *row[2])):
            before = verified(*row)
            print(before, flush=True)
        found.append(before)
    ROWS_OF.write_text(json.dumps(found, indent=1) + "\n")
    begin, _, rest = PAGE.read_text().partition(HEAD)
    PAGE.write_text(begin + HEAD + "\n".join(table(found)) + "\n\n" + rest.partition("\n\n")[2])


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for the plans of each job that agree, and one for each other plan."""
    agreeing: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        if one["verdict"].startswith(AGREES):
            agreeing.setdefault(one["job"], []).append(one)
    for job, plans in agreeing.items():
        largest = max((one["verdict"].removeprefix(AGREES) for one in plans), key=float)
        yield f"| {job} | {'; '.join(one['plan'] for one in plans)} | {AGREES}{largest} |"
    for one in found:
        if not one["verdict"].startswith(AGREES):
            yield f"| {one['job']} | {one['plan']} | {one['verdict']} |"


def words_of(plan: str, more: Sequence[str]) -> list[str]:
    """A plan and its options, as the page has them."""
    own = [option.partition("=")[2] or option for option in more if option != NO_GRAPHS]
    return [plan, *(option.removeprefix("--") for option in own)]


def verified(job: str, plan: str, more: tuple[str, ...]) -> dict[str, Any]:
    """What verify says of a job under a plan."""
    pairs = (part.split() for part in plan.split(" x "))
    degrees = [f"--parallelism.{DEGREES[axis]}_degree={degree}" for axis, degree in pairs]
    command = [sys.executable, "-m", "titanlite.cli", "verify", f"torchtitan:{job}"]
    done = subprocess.run([*command, *degrees, *more], capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    backend = re.search(r"by the backend (\w+)", said)
    verdict = re.search(r"\b(AGREES|DIFFERS|DOES NOT RUN)\b: (.*)", said)
    largest = re.search(r"max difference (\S+),", said)
    seconds = re.search(r"\((\d+)\.\d s\)", said)
    word = verdict[1].lower() if verdict else "is refused"
    if word == "agrees":
        word = AGREES + (largest[1] if largest else "0")
    else:
        why = re.search(r"likely cause: (.*?)(?:\. [A-Z]|; [\d.]+ is also| step +loss |$)", said)
        text = why[1] if why else verdict[2] if verdict else done.stderr.strip().splitlines()[-1]
        word += f": {text[:220]}".replace("|", "/")
    words = words_of(plan, more)
    if backend and backend[1] not in (USUAL, *words):
        words.append(backend[1])
    return {
        "job": job,
        "plan": ", ".join(words),
        "verdict": word,
        "seconds": int(seconds[1]) if seconds else None,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
