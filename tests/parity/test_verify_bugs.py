"""`titanlite verify` finds every recorded bug, on at most four ranks, and names its cause."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import recorded_bugs as bugs
from training import DEBUG_JOB, Sections, merged

from titanlite.config import JobConfig
from titanlite.errors import ConfigError
from titanlite.tools.verify.verify import Patch, Verifier

DDP = {"data_parallel_replicate_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
CP = {"context_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}
# On a GPU, too.
RINGS = {"enable_async_tensor_parallel": True, "async_tensor_parallel_backend": "ring"}


def float8(recipe: str) -> Sections:
    return {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize": {"linear": {"float8": {"recipe_name": recipe, "emulate": True}}},
    }


OWN: Sections = {
    "model": {"name": "plain", "flavor": "small"},
    "experimental": {"custom_import": "plain_model"},
}
ROTARY: Sections = {
    "model": {"name": "rotary", "flavor": "small"},
    "experimental": {"custom_import": "rotary_model"},
}


TIED: Sections = {
    "model": {"name": "tied", "flavor": "small"},
    "experimental": {"custom_import": "tied_model"},
    "training": {"local_batch_size": 8},
}


LLAMA3: Sections = {
    "model": {"name": "llama3", "flavor": "tiny", "dim": 64, "n_layers": 2, "vocab_size": 33},
    "experimental": {"custom_import": "packed_documents"},
    "training": {"dataset": "packed_documents", "seq_len": 32, "local_batch_size": 8},
}

EXPERTS: Sections = {
    "model": {"name": "llama3", "flavor": "moe_debug"},
    "training": {"dataset": "synthetic", "seq_len": 32},
}
EXPERTS_WHOLE = merged(EXPERTS, {"training": {"local_batch_size": 8}})
EP = {"expert_parallel_degree": 2}


@dataclass(frozen=True)
class Case:
    """A bug, the plan to which it is applied, and a pattern for the diagnosis."""

    patch: Patch
    plan: dict[str, Any]
    cause: str
    more: Sections | None = None
    steps: int = 1
    is_slow: bool = False
    """Slow, or similar to another case: not part of `make test`."""


CASES = [
    Case(
        bugs.reduced_twice,
        DDP,
        "all 24 gradients are 2 times as large as on one process, and 2 is the degree of "
        "dp_replicate: they are summed or multiplied by it once too often. The loss agrees",
    ),
    Case(
        bugs.larger_by_the_token_count,
        PP,
        r"all 24 gradients are \d+ times .*, and \d+ is the number of targets in the step",
        {"training": {"local_batch_size": 8}},
    ),
    Case(
        bugs.shown_loss_divided_by_cp,
        CP,
        "the loss is 0.5 times as large as on one process, and 0.5 is 1 over the degree of cp: it "
        "is divided once too often. Gradients agree, so only the reported loss is wrong",
        {"training": {"local_batch_size": 8}},
    ),
    Case(
        bugs.mean_of_means,
        FSDP,
        "a mean of means. The mean is taken over each data-parallel rank, and then over these",
    ),
    Case(
        bugs.mean_of_means,
        CP,
        "a mean of means. The mean is taken over each rank's part of the sequence, and then over",
        is_slow=True,
    ),
    Case(
        bugs.shards_start_alike,
        FSDP,
        "different shards have the same starting values: .* Draw each parameter at its full shape",
    ),
    Case(
        bugs.pending_input_to_a_compiled_block,
        {**TP, **FSDP},
        "the plan agrees with one process if compile.enable = false: "
        "the compiled module layers.0 receives the "
        "result of a collective that is still running",
        {**OWN, "compile": {"enable": True, "backend": "aot_eager"}},
        is_slow=True,
    ),
    Case(
        bugs.waiting_cuts_the_way_back,
        TP,
        "the plan agrees with one process if compile.enable = false: "
        "the gradient of tok_emb.weight is missing at "
        "the optimizer step",
        {**OWN, "compile": {"enable": True, "backend": "aot_eager"}},
        is_slow=True,
    ),
    Case(
        bugs.one_counter_for_both_passes,
        DDP,
        'the plan agrees with one process if activation_checkpoint.mode = "none": '
        "activation checkpointing "
        "recomputes values that differ from the forward pass, first in layers.0.attention.wk",
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    ),
    Case(
        bugs.norms_not_reduced,
        TP,
        r"9 of 24 gradients .*; exactly those replicated over tp\) are correct only after a sum "
        "over tp: each rank has the gradient of its own part of the batch only. Add the missing",
    ),
    Case(
        bugs.wrong_output_layout,
        TP,
        r"layers.0.w2 is the first module .* Summed over tp, the output is correct: it is a "
        r'Partial .*output layout that reduces it over tp .*"layers.\*.w2": RowwiseParallel',
        OWN,
        is_slow=True,
    ),
    Case(bugs.positions_from_zero, CP, "positions are wrong under context parallelism"),
    Case(
        bugs.positions_for_the_first_stage_alone,
        {**PP, **CP},
        "the `positions` argument of stage 1 of the pipeline is missing, on the ranks with pp 1: "
        "each rank then counts its tokens from 0",
        {**ROTARY, "training": {"local_batch_size": 8}},
        is_slow=True,
    ),
    Case(
        bugs.rotary_angles_from_zero,
        CP,
        r"layers\.0\.attention\.rotary is the first module in forward order whose output differs",
        LLAMA3,
        is_slow=True,
    ),
    Case(
        bugs.positions_for_the_first_stage_alone,
        {**PP, **CP},
        "the `positions` argument of stage 1 of the pipeline is missing, on the ranks with pp 1",
        LLAMA3,
        is_slow=True,
    ),
    Case(
        bugs.documents_forgotten_on_a_hop,
        CP,
        r"layers\.0\.attention\.inner is the first module in forward order whose output differs",
        LLAMA3,
        is_slow=True,
    ),
    Case(
        bugs.padding_counts_as_classes,
        TP,
        "every module output agrees, .* but the loss is .* the loss function, its targets or",
        LLAMA3,
        is_slow=True,
    ),
    Case(
        bugs.positions_from_zero_in_the_model,
        CP,
        "the input of embeddings.row_emb is the first tensor that differs, .* It is correct for "
        "positions 0 to 31: the code there is given, or computes, the wrong positions or offset",
        is_slow=True,
    ),
    Case(
        bugs.norm_counts_replicas,
        TP,
        "the gradient norm is .*, but every gradient agrees: gradients replicated over tp are "
        "counted 2 times",
    ),
    Case(
        bugs.norm_counts_replicas,
        DDP,
        "gradients replicated over dp_replicate are counted 2 times",
        is_slow=True,
    ),
    Case(
        bugs.tied_gradients_not_summed,
        PP,
        "the gradient of tok_emb.weight is correct only after a sum over the stages that hold a "
        "copy of this weight: each stage has only the gradient of its own use of the weight. Sum",
        TIED,
    ),
    Case(
        bugs.tied_gradients_not_summed,
        {**PP, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "the gradient of tok_emb.weight is correct only after a sum over the stages that hold",
        TIED,
        is_slow=True,
    ),
    Case(
        bugs.norm_counts_copies,
        PP,
        "the gradient norm is .*, but every gradient agrees: the tied weight tok_emb.weight is "
        "counted once on each stage that has a copy of it",
        TIED,
        is_slow=True,
    ),
    Case(
        bugs.norm_misses_strided_shards,
        {**TP, **FSDP},
        "gradients that dp_shard shards along an already sharded dimension are counted as if they "
        "were replicated: only the shard of the first rank of dp_shard is counted",
        is_slow=True,
    ),
    Case(
        bugs.data_by_rank,
        FSDP,
        "the data depend on the plan: at step 1 rank 1 reads sequences 1, 2, 3 and 4 of the batch "
        "instead of sequences 4 to 7",
    ),
    Case(
        bugs.last_microbatch_dropped,
        PP,
        r"; exactly those on pp 0\) are sums of correct contributions with wrong coefficients, .* "
        r"the contribution of microbatch 3 of 4 \(counted from 0, the last\) is missing",
        {
            "training": {"local_batch_size": 8},
            "parallelism": {"pipeline_parallel_microbatch_size": 2},
        },
    ),
    Case(
        bugs.ring_skips_a_block,
        CP,
        r"layers.0.attention.inner is the first module .* on rank 1 only \(cp 1\).*misses some of "
        "their keys and values",
    ),
    Case(
        bugs.ring_counts_up,
        {"tensor_parallel_degree": 4, **RINGS},
        r"layers.0.attention.wq is the first module .* on every rank; .*"
        r"GatherColwise\(dim=0, layers=\('wq', 'wk', 'wv'\)\) as a ring",
        is_slow=True,
    ),
    Case(
        bugs.ring_leaves_out_a_product,
        {**TP, **RINGS},
        r"layers.0.attention.wo is the first module .* on rank 1 only \(tp 1\).*"
        r"RowwiseLocal\(scatter_dim=0\) as a ring",
        is_slow=True,
    ),
    Case(
        bugs.halved_on_one_rank,
        DDP,
        r"all 24 gradients are 0.5 times as large as on one process, on rank 1 only "
        r"\(dp_replicate 1\), but correct on the other ranks; 0.5 is 1 over the degree of",
    ),
    Case(
        bugs.input_gradient_not_reduced,
        TP,
        r"the gradient of layers.1.norm.weight is correct only after a sum over tp, and .*, of "
        r"earlier modules, are wrong as a result: the module that reads the output of "
        r"layers.1.norm returns a gradient of its input that is still Partial over tp",
        OWN,
    ),
    Case(
        bugs.larger_between_modules,
        TP,
        "the error is between the output of layers.0.w1 and the input of layers.0.w2: that is the "
        r"first tensor that differs, on every rank. The code there: recorded_bugs.py:\d+ .*1.5 \* "
        ".* It is 1.5 times as large as on one process",
        OWN,
    ),
    Case(
        bugs.detached_between_modules,
        FSDP,
        "the backward pass is cut off: the input of layers.0.w1, which is computed from the output "
        "of layers.0.norm, requires no gradient, on every rank, but does on one process. .* in the "
        r"code there: recorded_bugs.py:\d+ .*detach",
        OWN,
    ),
    Case(
        bugs.jumps_in_positions_start_documents,
        CP,
        "layers.0.attention.inner is the first module .* up to where a rank's positions jump: .* a "
        "mask that is made from positions treats the jump as the start of a document",
        is_slow=True,
    ),
    Case(
        bugs.masks_of_the_first_tokens,
        CP,
        "the input token_numbers of the model is the first tensor that differs, .* It is correct "
        "for positions 0 to 31",
        {"model": {"dropout": 0.3}},
    ),
    Case(
        bugs.amax_of_own_tokens,
        FSDP,
        r"layers.\d.\S+ is the first float8 layer whose scales differ, on rank \d only .*: the "
        "amax there is that of the rank's own part of the tensor, but the largest amax of all "
        "ranks equals that of one process",
        float8("tensorwise"),
    ),
    Case(
        bugs.rowwise_cast_tensorwise,
        TP,
        "layers.0.attention.wo scales its input with one scale, but its recipe rowwise needs one "
        "scale per row, on every rank",
        float8("rowwise"),
        is_slow=True,
    ),
    Case(
        bugs.shared_experts_gradient_not_reduced,
        TP,
        r"the gradient of the input x of layers.2.moe.shared_experts is the first that "
        r"differs, .* layers.2.moe.shared_experts returns it, .* If it gathers its input over tp, "
        r"each rank has only its share of that gradient: sum it over tp",
        EXPERTS_WHOLE,
        is_slow=True,
    ),
    Case(
        bugs.bias_added_before_the_sum,
        TP,
        "layers.1.moe.shared_experts.w2 is the first module in forward order whose output differs",
        merged(
            EXPERTS_WHOLE,
            {
                "model": {"name": "biased_experts"},
                "experimental": {"custom_import": "biased_experts"},
            },
        ),
    ),
    Case(
        bugs.router_gradient_not_reduced,
        TP | EP,
        "layers.1.moe.router.gate.weight and layers.2.moe.router.gate.weight; exactly those of "
        r"GateLocal in the tensor-parallel plan\) are correct only after a sum over tp",
        EXPERTS_WHOLE,
        is_slow=True,
    ),
    Case(
        bugs.expert_gradients_averaged_over_their_shards,
        {"data_parallel_shard_degree": 4} | EP,
        r"6 of 38 gradients \(layers.1.moe.experts.w1, .*\) are 0.5 times as large as on one "
        r"process, and 0.5 is 1 over .* the number of shards of each expert \(efsdp\): they are "
        "averaged instead of summed",
        merged(EXPERTS, {"training": {"local_batch_size": 2}}),
        is_slow=True,
    ),
    Case(
        bugs.expert_gradients_doubled,
        FSDP | EP,
        r"6 of 38 gradients \(layers.1.moe.experts.w1, .*\) are 2 times as large as on one "
        "process, and 2 is .* the degree of ep: they are summed or multiplied by it once too often",
        EXPERTS,
        is_slow=True,
    ),
    Case(
        bugs.experts_left_out_of_the_norm,
        TP | EP,
        "every gradient agrees: of the gradients of routed experts, only those on tp 0 are "
        "counted, as if they were replicated over tp",
        EXPERTS_WHOLE,
    ),
    Case(
        bugs.sequence_loss_by_microbatch,
        FSDP | EP,
        "the auxiliary loss is 0.25 times as large as on one process, although every token goes to "
        "the same experts as there: 0.25 is 1 over the number of sequences of a microbatch",
        EXPERTS,
        is_slow=True,
    ),
    Case(
        bugs.counted_in_the_forward_pass,
        FSDP | EP,
        "the numbers of tokens of each expert of layers.1.moe, .* are 2 times those of one "
        "process; .* or again when a forward pass is recomputed",
        merged(
            EXPERTS,
            {"model": {"moe_sequence_loss_coeff": 0.0}, "activation_checkpoint": {"mode": "full"}},
        ),
        is_slow=True,
    ),
    Case(
        bugs.bias_updated_every_microbatch,
        FSDP | EP,
        r"layers.1.moe.router sends \d+ of 256 tokens to other experts than one process, .* The "
        "first is token .* The first microbatch agrees: the balancing bias changes within the step",
        merged(EXPERTS, {"training": {"local_batch_size": 2}}),
    ),
    Case(
        bugs.counts_of_own_tokens,
        FSDP | EP,
        "ranks have different ones: sum the counts over every axis that splits tokens",
        merged(EXPERTS, {"model": {"moe_sequence_loss_coeff": 0.0}}),
        is_slow=True,
    ),
    Case(
        bugs.shared_experts_reduced_twice,
        TP | EP,
        "the outputs of layers.1.moe.experts and layers.1.moe.shared_experts agree, but their sum, "
        "the output of layers.1.moe, differs: one of them is reduced over ranks once more",
        EXPERTS_WHOLE,
        is_slow=True,
    ),
    Case(
        bugs.wrong_offset_of_experts_on_one_rank,
        FSDP | EP,
        "layers.1.moe routes every token as one process does, .* but the output of "
        "layers.1.moe.experts differs, .* Check the offset of each rank's first expert",
        EXPERTS,
        is_slow=True,
    ),
    Case(
        bugs.combined_in_another_order,
        FSDP | EP,
        "each expert.s results are right, .* On their way back rows change their order",
        EXPERTS,
        is_slow=True,
    ),
    Case(
        bugs.padded_rows_have_gradients,
        FSDP | EP,
        "only the gradients of routed experts differ, by no common factor, .* padded rows, "
        "which are not tokens, contributed to the experts' gradients. Give padded rows a gradient",
        EXPERTS,
    ),
    Case(
        bugs.replicas_drift,
        DDP,
        r"the learning rate of step 2 is .* on rank 1 only",
        steps=3,
        is_slow=True,
    ),
]


def config_of(case: Case) -> JobConfig:
    job: Sections = {"parallelism": case.plan, "training": {"local_batch_size": 4}}
    sections = merged(DEBUG_JOB, job, case.more or {})
    if "name" in sections["model"]:
        del sections["model"]["zero_init_output"]
    return JobConfig.from_dict(sections)


def name_of(case: Case) -> str:
    return f"{case.patch.__name__} {' '.join(case.plan)}"


def test_every_bug_fits_the_sources() -> None:
    for case in CASES:
        with case.patch():
            pass


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case.is_slow else (), id=name_of(case))
        for case in CASES
    ],
)
def test_the_bug_is_caught_and_its_cause_named(verifier: Verifier, case: Case) -> None:
    found = verifier.verify(config_of(case), steps=case.steps, patch=case.patch)
    assert not found.agrees
    assert found.job.dims.world_size <= 4
    assert re.search(case.cause, found.cause), "\n".join(found.findings)


def test_a_style_that_skips_float8_is_named(verifier: Verifier) -> None:
    """By the plan itself, verified or not, at its first forward pass."""
    case = Case(bugs.style_without_float8, TP, "", float8("rowwise"))
    found = verifier.verify(config_of(case), steps=1, patch=case.patch)
    assert not found.agrees
    assert "layers.0.attention.wo is a float8 layer" in found.cause


@pytest.mark.slow
def test_what_differs_in_float32_is_diagnosed_in_float64(verifier: Verifier) -> None:
    found = verifier.verify(config_of(CASES[0]), steps=1, dtype="float32", patch=CASES[0].patch)
    assert not found.agrees
    assert found.dtype == "float32"
    assert re.search(CASES[0].cause, found.cause), "\n".join(found.findings)


@pytest.mark.slow
def test_the_same_plans_agree_without_a_bug(verifier: Verifier) -> None:
    # Those that compile on four ranks take as long as all others together.
    cases = [case for case in CASES if case.more and len(case.plan) == 1]
    assert len(cases) > 4
    for case in cases:
        found = verifier.verify(config_of(case), steps=2)
        assert found.agrees, found.findings


def test_what_the_device_lacks_is_refused() -> None:
    """On a GPU, async TP is symmetric memory by default, and that needs the compiler."""
    job = config_of(Case(bugs.ring_counts_up, {**TP, "enable_async_tensor_parallel": True}, ""))
    with (
        Verifier(threads=True, device_type="cuda") as verifier,
        pytest.raises(ConfigError, match="symmetric memory needs the compiler"),
    ):
        verifier.verify(job, steps=1)
