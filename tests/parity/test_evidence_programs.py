"""The programs of docs/evidence: what compare says of those that its diagnosis was mended for."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import titanlite
from titanlite.tools.verify import Comparer

PROGRAMS = Path(__file__).parents[2] / "docs/evidence/programs"
CAUSES = {
    "faulty/balance_loss_discards_all_reduce": "the sum over dp makes the result of .*:24 ",
    "faulty/clipped_after_every_backward": "all 15 gradients are sums over the microbatches",
    "faulty/cp_labels_shifted_per_rank": "loss is .*another result .*:58 .* has rows or columns",
    "faulty/diloco_sign": "change of these weights is -1 times",
    "faulty/muon_on_local_shards": "its shard is taken for the whole tensor",
    "faulty/no_sync_wrong_microbatch": "the part of microbatch 1 of rank 1 is missing, and the oth",
    "faulty/query_norm_over_local_heads": "a value of the same line, .* only the mean over tp is",
    "faulty/vocab_parallel_padding_index": "differs only in row 13 of 20, .* on rank 1 only",
    "faulty_2/ema_weights_not_restored": "changed before the forward pass of step 3, on rank 0",
    "faulty_2/gan_keeps_generator_gradients": "add to them 2 times as often as on one process",
    "faulty_2/group_norm_of_own_patch": "norm1 .*module reads only this rank.s part .* nothing",
    "faulty_2/last_window_divided_by_all_steps": "step 3 has 2 microbatches, and each counts 1/4",
    "faulty_2/observer_of_own_rank": "x.amin.* only the minimum over dp is right",
    "faulty_2/sampler_repeats_a_sample": "row 0 is read by several, the others by one",
    "faulty_2/zero_loses_parameter_groups": "-0.001 times the weights .* the weight decay",
    "faulty_2/boxes_of_all_ranks": "different reductions: the mean over dp .* the sum .* makes",
    "faulty_2/expert_bias_of_local_counts": r"moe\.expert_bias; ranks hold different values",
    "faulty_2/linear_cross_entropy_embedding_gradient": "its sum over tp is correct, so it is",
    "faulty_2/loss_weight_summed_over_the_world": "all 10 gradients are 0.5 times as large",
    "faulty_2/pp_uneven_microbatches": "a mean of means. Each part counts 0.3333",
    "faulty_2/sequence_parallel_norm_of_whole_input": r"input of h\.ln_1.* \[2, 12, 16\]",
    "faulty_2/spike_skipped_on_one_rank": "leaves all 6 weights unchanged, on rank 1 only",
    "faulty_3/sampler_of_global_ranks": "anks 0 and 1 have shards .* not read the same samples",
    "faulty_3/shared_expert_inside_the_all_reduce": "shared_expert once too often",
    "faulty_3/text_tokens_once_per_rank": r"before the input of block\.attn\.to_out",
    "faulty_3/zero2_buffer_keeps_the_last_step": "all 10 gradients contain 1 times .* step 1, too",
    "faulty_3/zero_tail_belongs_to_no_rank": "leaves 3 elements as they were",
    "faulty_4/batchnorm_counted_twice": "runs 2 times in a step, as in a forward pass that is rec",
    "faulty_4/cached_logps_counted_twice": r"another result .*:56 \(reference = ",
    "faulty_4/encoder_memory_gradient": "or earlier: .* Partial from .* of cross_attention",
    "faulty_4/lora_scale_of_local_rank": "computes mul with 3, on one process 1.5",
    "faulty_4/padding_attended": "What it reads agrees, but has rows or columns of padding",
    "faulty_4/pp_middle_stages_without_mask": "masked_fill.*, which does not run here",
    "faulty_4/pp_tied_gradient_averaged": "0.5 is 1 over the degree of pp or the number of micro",
    "faulty_4/ring_dkv_one_hop_short": "It has the gradients of other rows of one process",
    "faulty_4/router_loss_per_microbatch": "the mean over the microbatches .* the sum over the",
    "faulty_4/summoned_weights_lost": "91 elements differ, which are zero on one process",
    "faulty_4/vocabulary_padding_in_softmax": "output of the model, which it reads, has .*padding",
    "faulty_4/zigzag_output_not_restored": "everything is right, on every rank, but has the rows",
    "faulty_5/clipped_before_unscaling": "their norm is 0.0009766 in every step: they are clipped",
    "faulty_5/dice_not_summed_after_gather": ":45 .*only the sum over dp is right",
    "faulty_5/entropy_threshold_of_own_tokens": ":33 .*is only this rank.s part",
    "faulty_5/gradient_mask_hooks_lost": "differ only in elements that are zero on one process",
    "faulty_5/interleaved_streams_lose_their_split": "rows 2, 3, 6, 7 are read by no rank",
    "faulty_5/noise_of_the_same_seed": "torch.randn.* draws random numbers",
    "faulty_5/norm_statistic_without_gradient": "nothing in its backward pass: a collective such",
    "faulty_5/pp_receive_buffers_too_few": "input of blocks.1.norm was overwritten after the",
    "faulty_5/pp_rope_buffer_zero_after_meta": "buffer blocks.0.rope.inv_freq is zero, unlike",
    "faulty_5/row_linear_gathers_input_gradients": "only at 4 to 7 of 8 along dimension 0",
    "faulty_5/saved_input_gathered_along_first_dim": "how blocks.1 computes the gradient of",
    "faulty_5/tied_gradient_after_reduce_scatter": "of embed.weight, which several stages hold",
    "faulty_5/tokens_reduced_again": "the loss and all gradients are 0.684211 times",
    "faulty_5/zeros_for_unused_parameters": "A gradient of zeros is one, too",
}
"""Program -> what its diagnosis must say."""


# The others take longer.
FAST = {
    *("faulty/diloco_sign", "faulty/muon_on_local_shards", "faulty/vocab_parallel_padding_index"),
    *("faulty_2/ema_weights_not_restored", "faulty_2/gan_keeps_generator_gradients"),
    *("faulty_2/group_norm_of_own_patch", "faulty_2/observer_of_own_rank"),
    *("faulty_2/sampler_repeats_a_sample", "faulty_2/zero_loses_parameter_groups"),
}
AGREE = (
    *("correct_2/gradients_reduced_to_their_owner", "correct_2/sparse_embedding_under_ddp"),
    *(
        "correct_4/adafactor_with_reduced_means",
        "correct_5/scaled_gradients_clipped_by_scaled_norm",
    ),
)


def said_of(program: str, comparer: Comparer, monkeypatch, capsys) -> str:
    monkeypatch.setattr(titanlite, "compare", comparer.compare)
    runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=[pytest.mark.slow] * (p not in FAST)) for p in CAUSES]
)
def test_the_cause_is_named(program, comparer, monkeypatch, capsys):
    said = said_of(program, comparer, monkeypatch, capsys)
    assert re.search(f"likely cause: .*{CAUSES[program]}", said), said


@pytest.mark.parametrize("program", AGREE)
def test_a_correct_program_agrees(program, comparer, monkeypatch, capsys):
    assert "AGREES" in said_of(program, comparer, monkeypatch, capsys)
