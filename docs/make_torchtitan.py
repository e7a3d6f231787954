"""Verifies the jobs and plans of the table in evidence/torchtitan.md, and writes the table.

python docs/make_torchtitan.py            # all rows, each in a process of its own
python docs/make_torchtitan.py gpt_oss    # those whose job has this in its name; others stay
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("evidence") / "torchtitan.md"
HEAD = "| job | plan | backend | verdict | largest difference | seconds |"
RULE = "| --- | --- | --- | --- | --- | --- |"

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
    ("gpt_oss_debugmodel", "fsdp 2", ()),
    ("gpt_oss_debugmodel", "ep 2", (NO_GRAPHS,)),
    ("gpt_oss_debugmodel", "tp 2", ()),
    ("gpt_oss_debugmodel", "tp 2", PARTIAL),
    ("muse_glimmer_debugmodel", "tp 2", ()),
    ("llama3_debugmodel_dist_gemm", "tp 2", ()),
]


def main(chosen: str = "") -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    known = dict(zip(ROWS, table[table.index(HEAD) + 2 :], strict=False)) if HEAD in table else {}
    lines = []
    for row in ROWS:
        line = known.get(row)
        if chosen in " ".join((row[0], row[1], *row[2])) or line is None:
            line = verified(*row)
            print(line, flush=True)
        lines.append(line)
    begin, _, rest = PAGE.read_text().partition(HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text("\n".join([begin + HEAD, RULE, *lines, "", after]))


def verified(job: str, plan: str, more: tuple[str, ...]) -> str:
    """A row of the table."""
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
    if word != "agrees":
        why = re.search(r"likely cause: (.*?)(?:\. [A-Z]|$)", said)
        text = why[1] if why else verdict[2] if verdict else done.stderr.strip().splitlines()[-1]
        word += f": {text[:220]}".replace("|", "/")
    own = [option.partition("=")[2] or option for option in more if option not in (NO_GRAPHS,)]
    own = [option for option in own if backend is None or option != backend[1]]
    cells = (
        job,
        ", ".join([plan, *(option.removeprefix("--") for option in own)]),
        backend[1] if backend else "",
        word,
        largest[1] if largest else "",
        seconds[1] if seconds else "",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(*sys.argv[1:])
