"""`titanlite.compare` on whole programs: which agree, and between what an error is said to be."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import more_parallel_code as code
import pytest
import torch
from torch import nn

from titanlite.tools.verify.program.comparison import Comparer
from titanlite.tools.verify.program.result import Comparison

DP: dict[str, Any] = {"ranks": {"dp": 2}, "split": "dp"}
TP: dict[str, Any] = {"ranks": {"tp": 2}, **code.TP}
SP: dict[str, Any] = {"ranks": {"sp": 2}, "split": {"sp": 1}}
VOCABULARY: dict[str, Any] = {"ranks": {"tp": 2}, "parallel_loss": code.vocabulary_loss}
EP: dict[str, Any] = {
    "ranks": {"ep": 2},
    "split": "ep",
    "leave_out": ["*.counts"],
    "reference": code.make_experts,
}


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


def compare(comparer, parallel, options, fault="") -> Comparison:
    given = {"reference": code.Model, "batches": code.make_batches(), "loss": code.loss, **options}
    if fault and "step" in given:
        given["step"] = functools.partial(given["step"], fault=fault)
    elif fault:
        parallel = functools.partial(parallel, fault=fault)
    return comparer.compare(parallel=parallel, **given)


def in_dp(model):
    return lambda mesh: code.averaged(model())


def narrow_layer():
    return nn.Linear(4, 4, bias=False)


MUON = {
    **DP,
    "reference": narrow_layer,
    "batches": [torch.linspace(-1, 1, 16).view(4, 4) ** 3],
    "loss": lambda model, batch: model(batch).square().mean(),
    "optimizer": lambda parameters: torch.optim.Muon(parameters),
}
CORRECT = {
    "sequence shards, flattened": (code.sequence_parallel, SP, ""),
    "a fused QKV matrix": (code.tensor_parallel, TP, ""),
    "exchanged tokens": (code.expert_parallel, EP, "not compared: what leave_out names"),
    "a loss of vocabulary shards": (code.vocabulary_parallel, VOCABULARY, ""),
    "microbatches and a validation": (code.data_parallel, {**DP, "step": code.accumulating}, ""),
    "Partial gradients": (
        code.partial_gradients,
        {"ranks": {"tp": 2}},
        "the gradient of head.bias is still Partial at the optimizer step, but the weights",
    ),
    "interleaved shards": (code.interleaved, {"ranks": {"tp": 2}}, ""),
    "interleaved shards, copied": (
        code.interleaved,
        {"ranks": {"tp": 2}, "seed": None, "copy_weights": True},
        "",
    ),
    "a batch of DTensors": (
        in_dp(code.Model),
        {"ranks": {"dp": 2}, "split": code.as_dtensors, "parallel_loss": code.local_loss},
        "",
    ),
    "state in an attribute": (
        code.remembering,
        {"ranks": 2, "reference": code.Remembering, "batches": code.make_batches(2)},
        "",
    ),
    "no run in float64": (
        in_dp(code.Grouped),
        {**DP, "reference": code.Grouped, "dtype": "float32"},
        "the reference does not run in float64",
    ),
    "a narrow optimizer": (in_dp(narrow_layer), MUON, ""),
}


# The others are slow: a comparison takes about a second of CPU time.
OFTEN = (
    "sequence shards, flattened",
    "exchanged tokens",
    "Partial gradients",
    "interleaved shards, copied",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in CORRECT]
)
def test_a_correct_program_agrees(comparer, name):
    parallel, options, note = CORRECT[name]
    found = compare(comparer, parallel, options).check()
    assert re.search(note, " ".join(found.notes)), found.notes
    assert bool(note) == bool(found.notes)
    if name == "a narrow optimizer":
        assert found.narrowed == ("the optimizer (float64 to bfloat16)",)


LINE = r"more_parallel_code.py:\d+ "
FAULTS = [
    (
        code.sequence_parallel,
        SP,
        "view",
        "the error is after the output of attention and the output of embed, and before the input "
        rf"of norm: .* on every rank. The code there: {LINE}\(y = y.view\(y.size\(1\)",
    ),
    (
        code.sequence_parallel,
        SP,
        "function",
        r"before the input of head: .* \(return x \* \(1 \+ x.mean\(1, keepdim=True\)\)\)",
    ),
    (
        code.sequence_parallel,
        SP,
        "turned",
        "the error is between the output of embed and the input x of attention: .* It has the rows "
        "or columns of one process, in another order",
    ),
    (
        code.sequence_parallel,
        SP,
        "half",
        "between the output of norm and the input x of mlp: .*It is 0.5 times as large",
    ),
    (
        code.sequence_parallel,
        SP,
        "detached",
        "the backward pass is cut off: the input x of attention, which is computed from the output "
        "of embed, requires no gradient, on every rank, .* collective that has no backward pass, "
        rf"in the code there: {LINE}",
    ),
    (
        code.sequence_parallel,
        SP,
        "data",
        "no gradient of the output of attention arrives from the input of norm and the input of "
        r"head, on every rank. .*\(y = y.data\)",
    ),
    (
        code.sequence_parallel,
        SP,
        "unsummed",
        "the gradient of the output of embed is the first that differs, .* The gradient of the "
        "input x of attention is correct after a sum over sp: it is still Partial over sp. "
        rf"All-reduce it over sp between the two, .* The code there: {LINE}\(return gradient.chunk",
    ),
    (
        code.tensor_parallel,
        TP,
        "not copied",
        "the gradient of the output of embed .* input x of attention is correct after a sum",
    ),
    (
        code.tensor_parallel,
        TP,
        "doubled",
        r"between the output of embed and the input x of attention: .*\(given = given \* 2\)",
    ),
    (
        code.tensor_parallel,
        TP,
        "detach",
        r"the backward pass is cut off: the input of norm, .*\(x = x.detach\(\)\)",
    ),
    (
        code.expert_parallel,
        EP,
        "scaled",
        "the error is after the output of mlp.experts.1 and the output of mlp.experts.0, and "
        "before the output of mlp: .* It is 2 times as large as on one process",
    ),
    (code.expert_parallel, EP, "order", "before the output of mlp: .* in another order"),
    (
        code.vocabulary_parallel,
        VOCABULARY,
        "logarithm",
        r"which differ by log\(2\), and 2 is the degree of tp: inside a logarithm",
    ),
    (
        code.vocabulary_parallel,
        VOCABULARY,
        "targets",
        "gradient of the output of the model is the first that differs, on every rank. The loss "
        "reads it, so the backward pass of the loss itself is wrong",
    ),
    (
        code.data_parallel,
        {**DP, "step": code.accumulating},
        "doubled",
        r"sums over the microbatches with wrong coefficients, .* 1 times \(microbatch 1 of rank 0 "
        r"and rank 1\) and 2 times \(microbatch 0 of rank 0 and rank 1\)$",
    ),
    (
        code.data_parallel,
        {**DP, "loss": code.weighted, "step": code.weighing},
        "",
        "a mean of means. .* different numbers, or weights, of targets",
    ),
    (
        code.data_parallel,
        {
            **DP,
            "loss": code.weighted,
            "step": code.weighing,
            "batches": code.make_batches(is_masked=True),
        },
        "by count",
        r"each part counts in proportion to its number of elements in \['targets'\], but",
    ),
    (
        code.expert_parallel,
        {**EP, "leave_out": []},
        "",
        "buffers differ from those of one process after step 1: mlp.counts",
    ),
]


FAULTS_OFTEN = ("view", "turned", "detached", "unsummed", "scaled", "targets")


@pytest.mark.parametrize(
    ("parallel", "options", "fault", "cause"),
    [
        pytest.param(
            *each,
            marks=() if each[2] in FAULTS_OFTEN else pytest.mark.slow,
            id=f"{each[0].__name__} {each[2]}",
        )
        for each in FAULTS
    ],
)
def test_the_first_sentence_has_the_place(comparer, parallel, options, fault, cause):
    found = compare(comparer, parallel, options, fault)
    assert not found.agrees
    assert re.search(cause, found.cause), "\n".join(found.findings)
    assert len(found.findings) == 1


def test_a_fused_matrix_is_found_by_its_starting_values(comparer):
    options = {"ranks": {"tp": 2}, "rename": code.TP["rename"]}
    compare(comparer, code.tensor_parallel, options, "").check()
