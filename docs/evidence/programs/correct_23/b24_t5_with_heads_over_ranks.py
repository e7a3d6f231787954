"""Summaries by a small T5 under tensor parallelism: heads and inner units are cut by parallelize_module.

Thread: OpenNMT/CTranslate2 issue #1708 "Different results when run with tensor parallelism" (2024), on Flan-T5: the
relative position bias has a column per head and has to follow the heads (pull request #1714 "fix position bias in
tensor parallel").
Correct: relative_attention_bias is an embedding with a column per head; cut by columns, each rank looks up the bias of
its own heads, and the gradient of a column comes from its heads alone. Only the first block of each stack has it, the
others get its output. n_heads is halved only in the cross attention, which makes its zero bias from it; all other
shapes follow from view(-1). The encoder's output goes into the keys and values of every decoder block as a replicated
input, whose gradient ColwiseParallel sums over the ranks. Layer norms and the shared embedding, which is also the head,
see the same replicated activations everywhere, so their gradients are equal without a reduction.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import T5Config, T5ForConditionalGeneration

import titanlite

VOCAB, PAD, SOURCE, TARGET, ROWS = 26, 0, 10, 6, 4


def build_model():
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        initializer_factor=1.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return T5ForConditionalGeneration(config)


def attention_plan(attention):
    plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}
    if attention.has_relative_attention_bias:
        plan["relative_attention_bias"] = ColwiseParallel()
    return plan


FEED_FORWARD_PLAN = {"wi_0": ColwiseParallel(), "wi_1": ColwiseParallel(), "wo": RowwiseParallel()}


def tensor_parallel(model, mesh):
    for block in [*model.encoder.block, *model.decoder.block]:
        attention = block.layer[0].SelfAttention
        parallelize_module(attention, mesh, attention_plan(attention))
        if block.is_decoder:
            attention = block.layer[1].EncDecAttention
            parallelize_module(attention, mesh, attention_plan(attention))
            attention.n_heads //= mesh.size()
        parallelize_module(block.layer[-1].DenseReluDense, mesh, FEED_FORWARD_PLAN)
    return model


def plain():
    return build_model()


def parallel(mesh):
    return tensor_parallel(build_model(), mesh["tp"])


def loss(model, batch):
    """The cross-entropy of the summaries, each weighted equally whatever its length."""
    summaries = batch["summaries"]
    logits = model(
        input_ids=batch["documents"],
        attention_mask=(batch["documents"] != PAD).long(),
        decoder_input_ids=F.pad(summaries[:, :-1], (1, 0), value=PAD),
    ).logits
    losses = F.cross_entropy(logits.transpose(1, 2), summaries, ignore_index=PAD, reduction="none")
    return (losses.sum(1) / (summaries != PAD).sum(1)).mean()


generator = torch.Generator().manual_seed(1708)


def texts(width, least):
    tokens = torch.randint(1, VOCAB, (ROWS, width), generator=generator)
    lengths = torch.randint(least, width + 1, (ROWS, 1), generator=generator)
    return tokens * (torch.arange(width) < lengths)


batches = [{"documents": texts(SOURCE, 5), "summaries": texts(TARGET, 2)} for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
