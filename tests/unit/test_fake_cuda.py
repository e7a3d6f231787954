"""Steps on fake CUDA tensors: every feature runs on one device, and waits for it once a step."""

import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import titanlite

needs_newer_torch = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="a build with CUDA asks for its library"
)

ROOT = Path(titanlite.__file__).parents[1]
STEPS = ROOT / "docs/fake_cuda/steps.py"
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
# A data set that is read from a folder; its samples are zeros here.
FOLDER = {"cifar10": " --training.dataset_path=."}
MOE, FLOAT8 = "moe_ep4", "--quantize.linear.float8"
# What the configurations leave out.
MORE = [
    f"{MOE} --parallelism.expert_parallel_degree=1",
    f"{MOE} --parallelism.expert_parallel_degree=1 --training.mixed_precision_param=bfloat16",
    f"{MOE} --parallelism.tensor_parallel_degree=2",
    f"float8 {FLOAT8}.recipe_name=rowwise {FLOAT8}.enable_fsdp_float8_all_gather=false"
    f" {FLOAT8}.precompute_float8_dynamic_scale_for_fsdp=false",
    "fsdp4 --training.local_batch_size=4",
    "tp4 --compile.enable=true",
    "pp2_tp2 --parallelism.enable_async_tensor_parallel=true"
    " --parallelism.async_tensor_parallel_backend=ring",
    "tp2_fsdp2 --activation_checkpoint.mode=full --training.mixed_precision_param=bfloat16",
    "llama_tiny --training.mixed_precision_param=bfloat16 --parallelism.context_parallel_degree=2",
    "llama_tiny --training.mixed_precision_param=bfloat16 --training.attend_across_documents=false",
]
STEP, EXPERTS = "titanlite/training/step.py: _read", "titanlite/modules/experts/balancer.py: read"
# The optimizer of offloaded parameters runs on the host, with the norm of the whole job.
OF_HOST = [STEP, "titanlite/training/norm.py: clip_gradients"]
EXCHANGE = "titanlite/modules/experts/dispatch.py: __call__"
LOOP = "titanlite/modules/experts/products.py: swiglu"


def expected(job: str) -> list[str]:
    """Where a step waits, each line once: at its end, and where sizes decide what is sent."""
    if "moe" not in job:
        return OF_HOST if "offload" in job else [STEP]
    if "expert_parallel_degree=1" not in job:
        return [EXCHANGE, EXPERTS]
    return [EXPERTS] if "bfloat16" in job else [LOOP, EXPERTS]


pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def steps(*jobs: str, before: str = "") -> list[dict[str, Any]]:
    """What the script answers for each rank that it runs; `before` is code that runs first."""
    named = [job.partition(" ") for job in jobs]
    lines = [
        f"--job.config_file={ROOT}/configs/{name}.toml {rest}{FOLDER.get(name, '')}"
        for name, _, rest in named
    ]
    code = f"import sys; sys.path.insert(0, {str(STEPS.parent)!r})\n{before}\n"
    code += "import steps; steps.main()"
    run = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(*jobs: str, before: str = "") -> None:
    found = steps(*jobs, before=before)
    assert {one["job"].split()[0] for one in found} >= {
        f"--job.config_file={ROOT}/configs/{job.split()[0]}.toml" for job in jobs
    }
    for one in found:
        assert not one["error"], one
        waits = [f"{line.partition(':')[0]}: {line.rpartition(' ')[2]}" for line in one["waits"]]
        assert waits == expected(one["job"]), one


@needs_newer_torch
def test_steps_on_fake_cuda_tensors_wait_once() -> None:
    check("tp2_fsdp2", MOE)


@needs_newer_torch
def test_a_tensor_that_is_left_on_the_cpu_is_named() -> None:
    """Targets that never leave the CPU: the line that uses them is in the error."""
    left = (
        "from titanlite.modules.batch import Batch; to = Batch.to\n"
        "Batch.to = lambda self, *where: to(self, *where).replace(targets=self.targets)"
    )
    (found,) = steps("single", before=left)
    assert re.match(r"titanlite/training/loss.py:\d+ in token_loss_sum: ", found["error"]), found
    assert "found at least two devices" in found["error"]


@pytest.mark.slow
@needs_newer_torch
def test_documents_of_a_ring_have_no_mask_and_do_not_wait() -> None:
    several = (
        "import torch\nfrom titanlite.modules.batch import Batch\n"
        "from titanlite.parallelize.context_parallel import ring\n"
        "ring._mask, shard = None, Batch.shard\n"
        "numbers = lambda field: torch.arange(field.size(1)).expand_as(field) // 7\n"
        "Batch.shard = lambda batch, *to: "
        "shard(batch.replace(documents=numbers(batch.fields['documents'])), *to)"
    )
    job = f"{MORE[-1]} --parallelism.context_parallel_degree=2"
    striped = f"{job} --parallelism.context_parallel_load_balancer=striped"
    check(job, striped, before=several)


@pytest.mark.slow
@pytest.mark.parametrize("job", [*CONFIGS, *MORE])
def test_every_feature_runs_on_one_device(job: str) -> None:
    check(job)


@pytest.mark.slow
def test_every_module_is_imported() -> None:
    for module in pkgutil.walk_packages(titanlite.__path__, "titanlite."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
