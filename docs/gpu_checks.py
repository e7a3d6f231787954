"""Run titanlite on the GPUs of this machine, and write one report: what to do there first.

    python docs/gpu_checks.py FOLDER                  # report.md and a log of each check
    python docs/gpu_checks.py FOLDER --only verify    # or another of GROUPS, or several
    python docs/gpu_checks.py FOLDER --plan h100      # without a GPU: foretell what measure finds

Each check is a command of titanlite or a test, in a process of its own. On one GPU the ranks of a
plan are threads that share it; on several, plans of as many ranks also run over NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import titanlite
from titanlite.config import read_job
from titanlite.ranks.fork_server import prepare_environment
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
EVIDENCE = ROOT / "docs/evidence/gpu"
PLANNED, MEASURED = "planned.json", "measured.json"
# Data that a clone does not have; a compiled model under threads.
LEFT_OUT = ("cifar10", "compile")
GROUPS = (
    *("kernels", "documents", "train", "equal", "verify", "faults"),
    *("links", "speed", "measure", "operators"),
)
AT_ONCE = 8
# The recorded bugs of tests/parity are shared out to as many processes.
FAULT_PARTS = 6
LIMIT_SECONDS = 200
# Runs the command that follows on a list of cores.
ON_CORES = """
import os, sys
os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
os.execv(sys.argv[2], sys.argv[2:])
"""

SMALL = (*("--training.steps=6", "--validation.enable=false"), "--sampling.num_samples=0")
ALONE = (
    *("--parallelism.data_parallel_shard_degree=1", "--parallelism.tensor_parallel_degree=1"),
    *("--job.device=cuda", *SMALL),
)
# Features on one GPU: configuration, and options beside those of ALONE.
TRAINED: Mapping[str, tuple[str, ...]] = {
    "images": ("single",),
    "text": ("llama_tiny",),
    "experts": ("moe_ep4", "--parallelism.expert_parallel_degree=1"),
    "full recomputation": ("single", "--activation_checkpoint.mode=full"),
    "selective recomputation": (
        "llama_tiny",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ),
    "bfloat16": ("bf16",),
    "bfloat16 experts": (
        "moe_ep4",
        "--parallelism.expert_parallel_degree=1",
        "--training.mixed_precision_param=bfloat16",
    ),
    "float8": ("float8", "--training.mixed_precision_param=bfloat16"),
    "float8 rowwise": (
        "float8",
        "--training.mixed_precision_param=bfloat16",
        "--quantize.linear.float8.recipe_name=rowwise",
        "--quantize.linear.float8.enable_fsdp_float8_all_gather=false",
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=false",
    ),
    "offload": ("offload",),
    "compile": ("compile",),
    "compile, bfloat16, text": (
        "llama_tiny",
        "--compile.enable=true",
        "--training.mixed_precision_param=bfloat16",
    ),
    "deterministic": ("single", "--debug.deterministic=true"),
    "documents": ("llama_tiny", "--training.attend_across_documents=false"),
    "documents, compile, bfloat16": (
        *("llama_tiny", "--training.attend_across_documents=false"),
        *("--compile.enable=true", "--training.mixed_precision_param=bfloat16"),
    ),
    "checkpoints": ("single", "--checkpoint.enable=true", "--checkpoint.interval=3"),
    "checkpoints with pinned memory": (
        *("single", "--checkpoint.enable=true", "--checkpoint.interval=3"),
        "--checkpoint.async_mode=async_with_pinned_mem",
    ),
    "traces and snapshots": (
        *("single", "--profiling.enable_profiling=true", "--profiling.enable_memory_snapshot=true"),
        *("--profiling.profile_freq=4", "--profiling.profiler_warmup=1"),
        "--profiling.profiler_active=1",
    ),
    "four ranks as threads": (
        *("tp2_fsdp2", "--comm.mode=threads", "--parallelism.data_parallel_shard_degree=2"),
        "--parallelism.tensor_parallel_degree=2",
    ),
}
# In float64, a GPU and a CPU must train alike.
EQUAL = ("single", "llama_tiny", "gpt2_pp2_tp2", "moe_ep4")

NUM_STEPS = 10
# Eight blocks of Llama 3 8B, of one sequence of 8,192 tokens, in bfloat16.
BASE: dict[str, Any] = {
    "model.name": "llama3",
    "model.flavor": "8B",
    "model.n_layers": 8,
    "training.dataset": "synthetic",
    "training.seq_len": 8192,
    "training.local_batch_size": 1,
    "training.steps": NUM_STEPS,
    "training.mixed_precision_param": "bfloat16",
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "sampling.num_samples": 0,
    "metrics.log_freq": 1,
}
NONE = {"activation_checkpoint.mode": "none"}
FULL = {"activation_checkpoint.mode": "full"}
COMPILED = {"compile.enable": True}
BY_OPERATOR = {"activation_checkpoint.selective_ac_option": "op"}
LOSS_2024 = {
    "experimental.custom_import": "configs.plan.published.loss_2024",
    "training.loss": "loss_2024",
}
FLOAT8 = {"model.converters": ["quantize.linear.float8"]}
EIGHT = {
    "model.n_layers": 32,
    "training.global_batch_size": 8,
    "parallelism.data_parallel_shard_degree": 8,
}
NARROW = {"model.dim": 2048, "model.n_layers": 16, "training.seq_len": 2048}
MEASURES: Mapping[str, dict[str, Any]] = {
    "every second block recomputed": {},
    "recomputed by operator": BY_OPERATOR,
    "nothing recomputed": NONE,
    "all recomputed": FULL,
    "all recomputed, 2 sequences": FULL | {"training.local_batch_size": 2},
    "4 blocks, 32,768 tokens, all recomputed": FULL
    | {"model.n_layers": 4, "training.seq_len": 32768},
    "2,048 wide, 16 blocks, 8 x 2,048 tokens": NARROW | NONE | {"training.local_batch_size": 8},
    "the same, 4 microbatches of 2": NARROW
    | NONE
    | {"training.local_batch_size": 2, "training.global_batch_size": 8},
    "the same in float32": NARROW
    | NONE
    | {"training.local_batch_size": 4, "training.mixed_precision_param": "float32"},
    "GPT-2 124M, 16 x 1,024 tokens": NONE
    | {
        "model.name": "gpt2",
        "model.flavor": "124M",
        "model.n_layers": 12,
        "training.seq_len": 1024,
        "training.local_batch_size": 16,
    },
    "compiled, every second block recomputed": COMPILED,
    "compiled, all recomputed": COMPILED | FULL,
    "compiled, float8": COMPILED | FLOAT8,
    "float8": FLOAT8,
    "nothing recomputed, 2 sequences": NONE | {"training.local_batch_size": 2},
    "10 blocks, all recomputed": FULL | {"model.n_layers": 10},
    "4 blocks, every second recomputed, 4 sequences": {
        "model.n_layers": 4,
        "training.local_batch_size": 4,
    },
    "2,048 wide, 16 blocks, 16 x 2,048 tokens, all recomputed": NARROW
    | FULL
    | {"training.local_batch_size": 16},
    "GPT-2 XL, 8 x 1,024 tokens": NONE
    | {
        "model.name": "gpt2",
        "model.flavor": "1.5B",
        "model.n_layers": 48,
        "training.seq_len": 1024,
        "training.local_batch_size": 8,
    },
    "compiled, nothing recomputed": COMPILED | NONE,
    "by operator, the loss of all logits at once": BY_OPERATOR | LOSS_2024,
    "the same, compiled": BY_OPERATOR | LOSS_2024 | COMPILED | {"compile.components": ["model"]},
    "float8, by operator": BY_OPERATOR | FLOAT8,
    "compiled, float8, by operator": BY_OPERATOR | FLOAT8 | COMPILED,
}


# Llama 3 8B on 8 GPUs as in TorchTitan's table (docs/plan_published.md), which has 5,762 and 6,667
# tokens per second and GPU on H100 of 96 GB.
SPEED: Mapping[str, dict[str, Any]] = {
    name: {key: str(value).lower() if isinstance(value, bool) else value for key, value in job}
    for name, job in (
        ("8B, eager, 5,762 tokens/s in the table", (BASE | EIGHT).items()),
        ("8B, compiled, 6,667 tokens/s in the table", (BASE | EIGHT | COMPILED).items()),
    )
}

# Rows x columns x the dimension that is summed.
PRODUCTS = (
    *((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 1024, 4096)),
    *((8192, 128256, 4096), (4096, 8192, 14336), (16384, 2048, 2048), (16384, 5632, 2048)),
    *((2048, 2048, 2048), (512, 1024, 1024)),
)
# Batch, heads, key and value heads, tokens, head size.
ATTENTIONS = (
    *((1, 32, 8, 8192, 128), (8, 16, 16, 2048, 128), (1, 32, 8, 32768, 128)),
    (16, 12, 12, 1024, 64),
)


@dataclass
class Check:
    """A command, how it ended, and the lines of its log that a report shows."""

    group: str
    name: str
    command: list[str]
    status: int | None = None
    seconds: float = 0.0
    shown: str = ""


def checks(folder: Path, num_gpus: int) -> Iterator[Check]:
    """All checks but the measurement, those of several GPUs if there are any."""
    python, own = sys.executable, str(Path(__file__))
    kernels = "tests/unit/modules/test_attention_kernels.py", "tests/unit/observe"
    yield Check("kernels", "tests", [python, "-m", "pytest", "-q", "-m", "not slow", *kernels])
    own_check = str(ROOT / "docs/gpu_documents.py")
    yield Check("documents", "attention", [python, own_check, str(folder)])
    for name, (config, *options) in TRAINED.items():
        path, dump = f"configs/{config}.toml", folder / "runs" / name.replace(" ", "_")
        where = f"--job.dump_folder={dump}"
        command = [python, "train.py", f"--job.config_file={path}", where, *ALONE, *options]
        yield Check("train", name, command)
    for part in range(FAULT_PARTS):
        yield Check("faults", f"part {part}", [python, own, str(folder), "--faults", str(part)])
    for name in EQUAL:
        yield Check("equal", name, [python, own, str(folder), "--equal", name])
    for path in sorted(CONFIGS.glob("*.toml")):
        if path.stem in LEFT_OUT:
            continue
        command = [python, "-m", "titanlite", "verify", str(path.relative_to(ROOT))]
        command += ["--job.device=cuda", "--steps=2"]
        # Symmetric memory needs a process for each rank.
        ring = ["--parallelism.async_tensor_parallel_backend=ring"] * (path.stem == "tp2_async")
        yield Check("verify", f"{path.stem}, ranks as threads", [*command, *ring, "--threads"])
        num_ranks = read_job([f"--job.config_file={path}"]).draft().dims.world_size
        if 1 < num_ranks <= num_gpus:
            yield Check("verify", f"{path.stem}, {num_ranks} GPUs", [*command, "--processes"])
            bf16 = [*command, "--processes", "--dtype=bfloat16"]
            yield Check("verify", f"{path.stem}, {num_ranks} GPUs, bfloat16", bf16)


def several(folder: Path, num_gpus: int) -> Iterator[Check]:
    """Checks that need several GPUs for themselves: NCCL by the ranks of an axis, and speed."""
    python, own = sys.executable, str(Path(__file__))
    for axis in (2**n for n in range(1, 10) if 2**n <= num_gpus):
        yield Check("links", f"NCCL, {axis} ranks", [python, own, str(folder), f"--links={axis}"])
    for name, changes in SPEED.items() if num_gpus == 8 else ():
        values = {"job.device": "cuda", "job.dump_folder": str(folder / "runs/speed")} | changes
        options = [f"--{key}={value}" for key, value in values.items()]
        yield Check("speed", name, [python, "-m", "titanlite", "train", *options])


def links(num_ranks: int) -> int:
    """Print what NCCL reaches alone between adjacent ranks."""
    for name, gigabytes in spawn(bandwidths, num_ranks)[0].items():
        print(f"{name}: {gigabytes:.0f} GB/s of each rank; passed", flush=True)
    return 0


def bandwidths(place: Place) -> dict[str, float]:
    """GB/s that a rank sends in collectives of 256 MiB in bfloat16."""
    found = {}
    with open_world(place, "cuda") as world:
        whole = torch.zeros(1 << 27, dtype=torch.bfloat16, device=world.device)
        part, peers = whole.chunk(world.size)[world.rank].clone(), world.size - 1
        for name, times, call in (
            ("all-gather", 1, lambda: dist.all_gather_into_tensor(whole, part)),
            ("reduce-scatter", 1, lambda: dist.reduce_scatter_tensor(part, whole)),
            ("all-reduce", 2, lambda: dist.all_reduce(whole)),
        ):
            for rounds in (5, 20):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(rounds):
                    call()
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / rounds
            found[name] = times * peers / world.size * whole.nbytes / seconds / 1e9
    return found


def run(check: Check, folder: Path, cores: Queue[set[int]]) -> Check:
    """Run a check on some of the cores, with its output in a log of its own."""
    log = folder / "logs" / f"{check.group}, {check.name}.txt".replace(" ", "_").replace(",", "")
    log.parent.mkdir(parents=True, exist_ok=True)
    own = cores.get()
    began = time.monotonic()
    with log.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            [sys.executable, "-c", ON_CORES, ",".join(map(str, own)), *check.command],
            stdout=out,
            stderr=out,
            timeout=LIMIT_SECONDS,
            cwd=ROOT,
            check=False,
        )
        check.status = ended.returncode
    cores.put(own)  # also after a timeout
    check.seconds = time.monotonic() - began
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    words = ("AGREES", "DIFFERS", "DOES NOT", "done in", "passed", "failed", "Error")
    words = (*words, "differ by", "named", "tokens/s")
    shown = [line for line in lines if any(word in line for word in words)] or lines[-1:]
    check.shown = (shown[-1] if check.group != "verify" else shown[0]).replace("|", "/")[:160]
    return check


def equal(config: str) -> int:
    """Train on the GPU and on the CPU in float64; 0 if losses and norms agree."""
    found = {}
    for device in ("cpu", "cuda"):
        dtype = "--training.dtype=float64", f"--job.device={device}"
        whole = "--parallelism.pipeline_parallel_degree=1", "--parallelism.expert_parallel_degree=1"
        job = read_job(
            [f"--job.config_file={CONFIGS / config}.toml", *ALONE, *dtype, *whole]
        ).require()
        done = titanlite.train(job)
        found[device] = [*done.losses, *done.grad_norms]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*found.values(), strict=True))
    print(f"losses and gradient norms of 6 steps differ by {worst:.1e} at most")
    return 0 if worst < 1e-11 else 1


def faults(part: int) -> int:
    """Every recorded bug of a part, on ranks as threads on the GPU; 0 if all are named."""
    sys.path.insert(0, str(ROOT / "tests/parity"))
    from test_verify_bugs import CASES, config_of, name_of

    from titanlite.tools.verify.verify import Verifier

    missed, cases = [], CASES[part::FAULT_PARTS]
    with Verifier(timeout_seconds=120, threads=True, device_type="cuda") as verifier:
        for case in cases:
            try:
                found = verifier.verify(config_of(case), steps=case.steps, patch=case.patch)
                said = "agrees" if found.agrees else found.cause
            except Exception:  # a report has one line for each bug
                said = traceback.format_exc()
            if re.search(case.cause, said) is None:
                missed.append(name_of(case))
                print(f"{name_of(case)}:\n{said}\n", flush=True)
    print(f"{len(cases) - len(missed)} of {len(cases)} bugs named; not: {', '.join(missed) or '-'}")
    return 1 if missed else 0


def job_of(changes: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of a job of MEASURES."""
    values = BASE | {"job.dump_folder": str(folder / "runs/measure")} | changes
    values.setdefault("training.global_batch_size", values["training.local_batch_size"])
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def measure_one(changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train on the GPU: seconds of a step, GiB at the peak after the first, and reads of a step.

    `beside` is what is taken of the GPU beside torch's memory. A read is an operator for which the
    host waits for the device.
    """
    gc.collect()
    torch.cuda.empty_cache()
    reads: list[str] = []

    def on_step(event: Any) -> None:
        if event.step == 2:
            torch.cuda.reset_peak_memory_stats()
        # In the step before the last, which is none of those that are timed.
        torch.cuda.set_sync_debug_mode("warn" if event.step == NUM_STEPS - 2 else "default")

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = titanlite.train(job_of(changes, folder), on_step=on_step)
    reads = [f"{Path(w.filename).name}:{w.lineno}" for w in said if "synchroniz" in str(w.message)]
    free, total = torch.cuda.mem_get_info()
    lines = (done.dump_folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["seconds"] for line in lines[3:-2]]
    return {
        "seconds": statistics.median(steps),
        "slowest": max(steps),
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
        "beside": (total - free - torch.cuda.memory_reserved()) / 2**30,
        "reads": reads,
    }


def median_seconds(call: Callable[[], Any]) -> float:
    """The median of 12 calls on the GPU, after 3."""
    seconds = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[3:])


def measure_operators(folder: Path) -> None:
    """The speed of single operators, from which a hardware file of the planner is made."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    found: dict[str, Any] = {"products": {}, "add": {}, "attention": {}}
    for m, n, k in PRODUCTS:
        a, b = draw(m, k), draw(n, k)
        seconds = median_seconds(lambda a=a, b=b: a @ b.T)
        found["products"][f"{m}x{n}x{k}"] = f"{2 * m * n * k / seconds / 1e12:.1f} TFLOP/s"
    for num_bytes in (10**power * part for power in range(4, 10) for part in (2, 6)):
        a = draw(num_bytes // 4)
        b = torch.empty_like(a)
        seconds = median_seconds(lambda a=a, b=b: torch.add(a, 1, out=b))
        found["add"][f"{num_bytes:.0e} bytes"] = f"{num_bytes / seconds / 1e9:.1f} GB/s"
    for batch, heads, kv_heads, length, size in ATTENTIONS:
        q, k, v = (draw(batch, h, length, size) for h in (heads, kv_heads, kv_heads))
        inputs = [one.requires_grad_() for one in (q, k, v)]

        def attend(inputs: Sequence[torch.Tensor] = inputs) -> torch.Tensor:
            return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

        grad = torch.randn_like(attend())
        forward = median_seconds(attend)
        both = median_seconds(lambda i=inputs, g=grad: torch.autograd.grad(attend(), i, g))
        flops = 2 * batch * heads * length**2 * size
        rates = flops / forward / 1e12, 2.5 * flops / (both - forward) / 1e12
        name = f"{batch}x{heads}/{kv_heads}x{length}x{size}"
        found["attention"][name] = "{:.1f} TFLOP/s forward, {:.1f} backward".format(*rates)
    (folder / "operators.json").write_text(json.dumps(found, indent=1) + "\n")


def plan_one(changes: Mapping[str, Any], folder: Path, *, hardware: str) -> dict[str, float]:
    """What `titanlite plan` foretells on the hardware that --plan names."""
    figures, job = folder / "plan.json", folder / "job.toml"
    # All its keys are options.
    job.write_text("[job]\n")
    options = [
        f"--{section}.{key}={','.join(value) if isinstance(value, list) else value}"
        for section, keys in job_of(changes, folder).items()
        for key, value in keys.items()
    ]
    command = [sys.executable, "-m", "titanlite", "plan", str(job), "--hardware", hardware]
    command += ["--json", str(figures), *options]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise ValueError(ended.stderr.strip().splitlines()[-1])
    found = json.loads(figures.read_text())
    return {
        "seconds": found["time"]["seconds"],
        "allocated": found["peak_bytes"] / 2**30,
        "reserved": found["reserved_bytes"] / 2**30,
    }


def each_measure(
    one: Callable[[Mapping[str, Any], Path], dict[str, Any]],
    folder: Path,
    name: str,
    *,
    only_new: bool,
) -> None:
    """`one` of each of MEASURES, in the file `name`; what fails is a sentence.

    With `only_new`, those that the evidence in docs has are left out.
    """
    kept, found = EVIDENCE / name, dict[str, Any]()
    known = json.loads(kept.read_text()) if only_new and kept.exists() else {}
    for title, changes in MEASURES.items():
        if title in known:
            continue
        began = time.monotonic()
        try:
            found[title] = one(changes, folder)
        except Exception as error:
            found[title] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(f"{title}: {found[title]} ({time.monotonic() - began:.0f} s)", flush=True)
        (folder / name).write_text(json.dumps(found, indent=1) + "\n")


def table(plans: Mapping[str, Mapping[str, Any]], measured: Mapping[str, Any]) -> str:
    """A table of Markdown: milliseconds and GiB of a step as measured, and the errors of plans.

    Those of the memory are of the last plan that has the job.
    """
    rows = [["job", "measured, ms", *plans, "allocated, GiB", "plan", "reserved, GiB", "plan"]]
    for title in filter(measured.__contains__, MEASURES):
        found = measured[title]
        of_job = [plan.get(title, {}) for plan in plans.values()]
        last = [next(filter(None, reversed(of_job)), {})]
        row = [f"{title}: {found['error']}" if "error" in found else title]
        for kind, factor, digits, shown in (
            ("seconds", 1e3, ",.0f", of_job),
            ("allocated", 1, ".1f", last),
            ("reserved", 1, ".1f", last),
        ):
            value = found.get(kind)
            row.append("" if value is None else format(value * factor, digits))
            row += [f"{p[kind] / value - 1:+.1%}" if value and kind in p else "" for p in shown]
        rows.append(row)
    return as_markdown(rows)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "| --- " * len(rows[0]) + "|", *others])


def report(folder: Path, done: list[Check]) -> str:
    """What was found, as Markdown."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines = [
        "# titanlite on the GPUs of a machine\n",
        f"titanlite {titanlite.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, {len(names)} x {names[0]}\n",
        f"{sum(one.status == 0 for one in done)} of {len(done)} checks passed.\n",
        "| check | | seconds | |",
        "| --- | --- | --- | --- |",
    ]
    for one in done:
        verdict = {0: "passed", None: f"over {LIMIT_SECONDS} s"}.get(one.status, "**failed**")
        seconds = f"{one.seconds:.0f}"
        lines.append(f"| {one.group}: {one.name} | {verdict} | {seconds} | {one.shown} |")
    measured = folder / MEASURED
    if measured.exists():
        found = json.loads(measured.read_text())
        plan = json.loads((EVIDENCE / PLANNED).read_text())
        lines += ["", table({"plan": plan}, found)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--plan", metavar="HARDWARE")
    parser.add_argument("--new", action="store_true", help="leave out jobs that are measured")
    parser.add_argument("--equal", help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--faults", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--links", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if given.equal:
        return equal(given.equal)
    if given.measure:
        each_measure(measure_one, folder, MEASURED, only_new=given.new)
        return 0
    if given.faults is not None:
        return faults(given.faults)
    if given.links:
        return links(given.links)
    if given.plan:
        plan = partial(plan_one, hardware=given.plan)
        each_measure(plan, folder, PLANNED, only_new=given.new)
        return 0
    groups = given.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(GROUPS)}")
    if given.at_once < 1:
        parser.error("--at-once: give 1 or more")
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; --plan works without one")
    # Alone: nothing else may take the GPU meanwhile.
    if "measure" in groups:
        prepare_environment()  # as for a run: torch reads it once
        command = [sys.executable, __file__, str(folder), "--measure", *["--new"] * given.new]
        subprocess.run(command, check=True)
    if "operators" in groups:
        measure_operators(folder)
    chosen = [one for one in checks(folder, torch.cuda.device_count()) if one.group in groups]
    every = sorted(os.sched_getaffinity(0))
    at_once = min(given.at_once, len(every))
    cores: Queue[set[int]] = Queue()
    for index in range(at_once):
        cores.put(set(every[index::at_once]))
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(lambda one: run(one, folder, cores), chosen))
    whole: Queue[set[int]] = Queue()
    whole.put(set(every))
    alone = [one for one in several(folder, torch.cuda.device_count()) if one.group in groups]
    done += [run(one, folder, whole) for one in alone]
    text = report(folder, done)
    (folder / "report.md").write_text(text)
    print(text)
    return 0 if all(one.status == 0 for one in done) else 1


if __name__ == "__main__":
    sys.exit(main())
