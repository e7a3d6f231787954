"""The plugin of pytest, in a suite of somebody else, which runs in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.tools.verify.pytest_plugin import _are_threads

pytest_plugins = ["pytester"]

OPTIONS = ("-p", "titanlite.tools.verify.pytest_plugin", "-W", "error")
SUITE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])

def build():
    return nn.Linear(8, 4)

def with_ddp(mesh):
    return nn.parallel.DistributedDataParallel(build())

WHOLE = [{"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 3])}]
MASKED = [{"x": torch.randn(4, 8), "y": torch.tensor([0, -100, 2, 3])}]
FAILING = {"validation.enable": True, "validation.metrics": ["fails"]}
DP = {"loss": loss, "ranks": {"dp": 2}, "split": "dp"}
JOB = {
    "model": {"flavor": "debug"},
    "training": {"dataset": "digits", "global_batch_size": 8, "local_batch_size": 4},
    "parallelism": {"data_parallel_shard_degree": 2},
}

def test_agrees(assert_equivalent):
    before = torch.get_rng_state()
    assert assert_equivalent(build, with_ddp, batches=WHOLE, **DP).threads
    assert torch.equal(before, torch.get_rng_state())
    assert assert_equivalent(build, with_ddp, batches=WHOLE, max_ranks=2, **DP).threads

def test_differs(assert_equivalent):
    assert_equivalent(build, with_ddp, batches=MASKED, **DP)

class Ranked(nn.Linear):
    rank = 0
    def forward(self, x):
        return super().forward(x) * (1 + (Ranked.rank != torch.distributed.get_rank()))

def ranked(mesh):
    Ranked.rank = mesh.get_rank()
    return nn.parallel.DistributedDataParallel(Ranked(8, 4))

def test_shares_a_class(assert_equivalent):
    assert_equivalent(build, ranked, batches=WHOLE, **DP)

def test_mistake(assert_equivalent):
    assert_equivalent(build, with_ddp, batches=WHOLE, **{**DP, "split": "tp"})

def test_job_fails(verify_job):
    import titanlite

    def fails(outputs, batch):
        return 0, 1 / (2 - torch.distributed.get_world_size())

    titanlite.register_metric("fails", fails)
    verify_job(JOB, changes=FAILING, shrink=True, steps=1)
"""


def test_a_failure_says_what_is_wrong_at_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess(*OPTIONS, "-n1")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            ">       assert_equivalent(build, with_ddp, batches=MASKED, **DP)",
            "E       AssertionError: all 2 gradients are sums over * a mean of means*",
            "E       likely cause: all 2 gradients *",
            "E       parallel   with_ddp: dp 2, 2 ranks as threads",
            "*.py:*: AssertionError",
            "E       AssertionError: the ranks differ as threads, but agree as processes: *",
            '>       assert_equivalent(build, with_ddp, batches=WHOLE, *"split": "tp"})',
            "E       titanlite.errors.ConfigError: split: there is no axis 'tp'*",
            "*.py:*: ConfigError",
            ">       verify_job(JOB, changes=FAILING, shrink=True, steps=1)",
            "E       AssertionError: the plan does not run: rank ?: ZeroDivisionError: *",
            "E       DOES NOT RUN: *",
            "E       plan       dp_shard 2, 2 ranks as threads:",
            "E           return 0, 1 / (2 - torch.distributed.get_world_size())",
            "*.py:*: AssertionError",
        ]
    )
    assert "titanlite/tools/verify/pytest_plugin.py" not in result.stdout.str()


def test_until_it_is_used_nothing_is_imported_and_the_file_chooses_the_ranks(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        "import sys\n"
        "from titanlite.tools.verify.pytest_plugin import _are_threads\n"
        "def test_without_torch(assert_equivalent, pytestconfig):\n"
        "    assert 'torch' not in sys.modules and not _are_threads(pytestconfig)\n"
    )
    pytester.makeini("[pytest]\ntitanlite_ranks = processes")
    result = pytester.runpytest_subprocess(*OPTIONS)
    result.assert_outcomes(passed=1)


def test_the_command_line_comes_before_the_file_and_another_word_is_refused() -> None:
    def config(option: str | None, file: str) -> Any:
        return SimpleNamespace(getoption=lambda _: option, getini=lambda _: file)

    assert _are_threads(config("threads", "processes"))
    assert not _are_threads(config("processes", "threads"))
    with pytest.raises(pytest.UsageError, match="'fibers' is neither threads nor processes"):
        _are_threads(config(None, "fibers"))
