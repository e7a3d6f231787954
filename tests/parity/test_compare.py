"""`titanlite.compare` on parallel code that is not titanlite's: what agrees, what it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parallel_code as code
import pytest
import torch
import torch.distributed as dist

import titanlite
from titanlite.errors import ConfigError, TitanliteError

ROOT = Path(__file__).parents[2]

DP: dict[str, Any] = {"ranks": {"dp": 2}, "split": "dp"}
TP: dict[str, Any] = {"ranks": {"tp": 2}}
CP: dict[str, Any] = {
    "ranks": {"cp": 2},
    "split": code.zigzag,
    "batches": code.make_batches(length=8),
}
PP: dict[str, Any] = {"ranks": {"pp": 2}, "step": code.pipeline_step}
BY_HAND: dict[str, Any] = {**TP, "shard": code.shard_by_hand, "rename": code.names_by_hand}


@pytest.fixture(scope="module")
def comparer() -> Iterator[titanlite.tools.verify.Comparer]:
    with titanlite.tools.verify.Comparer(timeout_seconds=120) as comparer:
        yield comparer


def compare(
    comparer: titanlite.tools.verify.Comparer,
    parallel: Callable[..., Any],
    options: dict[str, Any],
    reference: Callable[[], Any] = code.Model,
) -> titanlite.tools.verify.Comparison:
    given = {"batches": code.make_batches(), "loss": code.loss, **options}
    return comparer.compare(reference, parallel, **given)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (code.with_ddp, DP),
        (code.with_fsdp2, DP),
        (code.with_fsdp1, DP),
        (code.with_plan, TP),
        (code.by_hand, BY_HAND),
        (code.with_pipeline, PP),
        (code.with_ddp, CP),
        pytest.param(code.compiled, {"ranks": 2, "split": "world"}, marks=pytest.mark.slow),
        pytest.param(
            code.with_fsdp2_and_plan,
            {"ranks": {"dp": 2, "tp": 2}, "split": "dp"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_correct_code_agrees(comparer, parallel, options):
    found = compare(comparer, parallel, options).check()
    assert found.margin > 100
    assert "AGREES" in str(found)
    assert not found.findings


@dataclass(frozen=True)
class Fault:
    parallel: Callable[..., Any]
    options: dict[str, Any]
    cause: str
    name: str
    more: dict[str, Any] = field(default_factory=dict)


FAULTS = [
    Fault(
        code.without_reduction,
        DP,
        "all 11 gradients are correct only after a sum over dp, divided by 2: .* Add the "
        "missing all-reduce over dp",
        "nothing reduced",
    ),
    Fault(
        code.scaled_twice,
        DP,
        "all 11 gradients are 0.5 times as large as on one process, and 0.5 is 1 over the degree "
        "of dp: they are averaged instead of summed, or divided once too often. The loss agrees",
        "averaged twice",
    ),
    Fault(
        code.with_ddp,
        DP,
        "a mean of means. Each part counts 0.5, but the parts' shares of the whole mean are "
        r"0.3636 \(rank 0\) and 0.6364 \(rank 1\)",
        "mean of means",
        {"batches": code.make_batches(is_masked=True)},
    ),
    Fault(
        code.another_seed_on_each_rank,
        DP,
        "replicas start with different values: all 11 parameters.* copy_weights=True",
        "seeded by rank",
    ),
    Fault(
        code.with_a_partial_output,
        TP,
        "blocks.0.down is the first module in forward order .* Summed over tp, the output is "
        "correct: it is a Partial that has not been reduced",
        "Partial output",
    ),
    Fault(
        code.with_a_larger_block,
        CP,
        "the error is between the output of blocks.1.down and the output of blocks.1: that is the "
        r"first tensor that differs, on every rank. The code there: parallel_code.py:\d+ .*1.5 \* "
        ".* It is 1.5 times as large as on one process",
        "larger output of some tokens",
    ),
    Fault(
        code.with_a_pending_gradient,
        TP,
        "the gradient of head.bias is still Partial at the optimizer step",
        "Partial gradient",
    ),
    Fault(
        code.without_copy,
        BY_HAND,
        "in the backward pass, the gradient of the output of blocks.0 is the first that differs, "
        "on every rank. The gradient of the input x of blocks.1 is correct after a sum over tp: it "
        "is still Partial over tp. All-reduce it over tp between the two, in the backward pass",
        "gradient of the input not reduced",
    ),
    Fault(
        code.without_sum,
        BY_HAND,
        "blocks.0.down is the first module .* Summed over tp, the output is correct",
        "output not reduced",
    ),
    Fault(
        code.with_turned_shards,
        BY_HAND,
        r"ranks hold each other's shards of 6 of 11 parameters .* exactly those sharded over tp\)",
        "shards of other ranks",
    ),
    Fault(
        code.with_unscaled_pipeline,
        PP,
        "all 11 gradients are 4 times as large as on one process, and 4 is the number of "
        "microbatches",
        "microbatches added up",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(comparer, fault):
    found = compare(comparer, fault.parallel, {**fault.options, **fault.more})
    assert not found.agrees
    assert re.search(fault.cause, found.cause), "\n".join(found.findings)
    with pytest.raises(AssertionError, match="likely cause"):
        found.check()


def test_weights_can_be_copied_from_the_reference(comparer):
    options = {**TP, "seed": None}
    differing = compare(comparer, code.with_plan, options)
    assert differing.failures[0].kind == "start"
    assert compare(comparer, code.with_plan, {**options, "copy_weights": True}).agrees
    options = {**DP, "seed": None, "copy_weights": True}
    assert compare(comparer, code.with_fsdp1, options).agrees


def test_float32_has_the_tolerance_of_its_rounding(comparer):
    found = compare(comparer, code.with_ddp, {**DP, "dtype": "float32"}).check()
    assert 1e-7 < found.tolerance.of(1, ("gradient", "head.weight")) < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "pp"}, "split: there is no axis 'pp'; the axes of `ranks` are dp"),
        ({"batches": []}, "batches: the list is empty"),
        ({"dtype": "float16"}, "dtype: 'float16' is not supported"),
        ({"ranks": {"dp": 0}}, "ranks: dp has 0 ranks; give a positive integer"),
        ({"ranks": "two"}, "ranks: 'two' is no number of ranks"),
        ({"loss": None}, "loss: None is not a function"),
        ({"loss": threading.Lock().acquire}, "loss: cannot be sent to the ranks"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(comparer, options, message):
    with pytest.raises(ConfigError) as raised:
        compare(comparer, code.with_ddp, {**DP, **options})
    (line,) = str(raised.value).splitlines()
    assert line.startswith(message)


def test_a_model_in_place_of_a_function_is_said(comparer):
    with pytest.raises(ConfigError, match="reference: Model is a model"):
        compare(comparer, code.with_ddp, DP, code.Model())


def test_a_batch_that_is_not_split_is_told(comparer):
    found = compare(comparer, code.with_ddp, {"ranks": {"dp": 2}}).check()
    assert "averaged cannot show" in " ".join(str(found).split())
    assert not compare(comparer, code.with_ddp, DP).doubts


def tokens_loss(model, batch):
    return model(batch["tokens"]).square().mean()


MISTAKES = {
    "names": (code.with_another_name, {}, "rename: on rank . the parameter output.weight and 1"),
    "missing": (code.without_a_block, {}, "no rank has blocks.1 of the reference: left out of"),
    "shapes": (code.with_a_smaller_layer, {}, r"shard: on rank . blocks.0.up.weight .*\[24, 8\]"),
    "dtype": (code.in_float32, {}, "embed.weight is float32, but the comparison runs in float64"),
    "batch": (
        code.with_ddp,
        {"batches": [{"tokens": torch.zeros(3, 7, dtype=torch.int64)}], "loss": tokens_loss},
        r"split: a tensor of shape \[3, 7\] has no 2 equal parts along dimension 0",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "names" else pytest.mark.slow) for n in MISTAKES]
)
def test_a_mistake_that_ranks_find_is_clear(comparer, name):
    parallel, options, message = MISTAKES[name]
    with pytest.raises(TitanliteError, match=message):
        compare(comparer, parallel, {**DP, **options})


def sum_in_parts(model, part):
    """A step whose gradients are scattered and gathered, and not divided by the ranks."""
    loss = code.loss(model, part)
    loss.backward()
    for gradient in (p.grad for p in model.parameters()):
        whole = torch.cat([gradient.flatten()] * 2)
        own = torch.empty(gradient.numel())
        work = dist.reduce_scatter_tensor(own, whole, async_op=True)
        _ = whole + 1.0
        work.wait()
        gradient.copy_(own.view_as(gradient))
    return loss.detach()


def test_what_gloo_copies_when_it_is_waited_for_overwrites_nothing(comparer):
    found = compare(comparer, code.Model, {**DP, "step": sum_in_parts})
    assert re.match(r"all \d+ gradients are 2 times as large as on one process", found.cause)


def test_random_numbers_are_reported(comparer):
    with pytest.raises(ConfigError, match="reference: a second run has another loss"):
        compare(comparer, code.with_ddp, DP, code.RandomModel)


def test_ranks_that_rely_on_equal_random_numbers_without_a_seed_differ(comparer):
    def step(model, batch):
        own = torch.rand(())
        dist.broadcast(first := own.clone(), 0)
        value = code.loss(model, batch) * (1 + own - first)
        value.backward()
        return value

    assert not compare(comparer, code.with_ddp, {**DP, "step": step}).agrees


def test_the_exception_of_a_rank_is_part_of_the_result(comparer):
    found = compare(comparer, code.fails_on_one_rank, DP)
    assert found.cause == "the parallel code does not run: rank 1: RuntimeError: no such layer"
    assert 'raise RuntimeError("no such layer")' in str(found)


@pytest.mark.slow
def test_different_collectives_end_with_a_report(comparer):
    found = compare(comparer, code.with_ddp, {**DP, "step": code.hangs})
    assert "all_reduce of 3 float64" in found.cause


@pytest.mark.slow
def test_a_reference_that_fails_raises_with_its_traceback(comparer):
    def fails():
        raise RuntimeError("no such file")

    with pytest.raises(TitanliteError, match="reference: does not run on one process"):
        compare(comparer, code.with_ddp, DP, fails)


def test_three_lines_in_a_test_suite():
    titanlite.assert_equivalent(
        code.Model, code.with_ddp, batches=code.make_batches(), loss=code.loss, **DP
    )


@pytest.mark.slow
def test_the_examples_of_the_docs_run(tmp_path):
    """As one script; those of other libraries are in test_compare_examples.py."""
    text = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    own = [block for block in blocks if "accelerate" not in block and "transformers" not in block]
    script = tmp_path / "examples.py"
    script.write_text("\n".join(own), encoding="utf-8")
    run = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in ("AGREES", "still Partial over tp"):
        assert words in " ".join(done.stdout.split())
