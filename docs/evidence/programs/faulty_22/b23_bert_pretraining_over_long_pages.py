"""Masked language modelling of long pages with a BERT: DDP, and each page's tokens spread over sequence parallel ranks.

Thread: ByteDance-Seed/VeOmni issue #1059 "[dist, parallel] fix: correct DDP gradient sync under Ulysses SP" (2026):
DDP wraps the model with the data parallel group, so gradients are never reduced over the sequence parallel ranks.
Fault: build_parallelize_model gives DDP the process group of the dp axis alone; every rank keeps the gradient of its
own piece of the pages, though the loss is scaled for an average over all dp and sp ranks.
REPAIR: `process_group = mesh.get_group("dp")` -> `process_group = dp_sp.get_group()`
A right first sentence says: DDP all-reduces the gradients over the dp group only and not over the sequence parallel
(sp) ranks, so each sp rank steps on the partial gradient of its own tokens and the replicas drift apart.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, BertConfig, BertForMaskedLM

import titanlite

VOCAB, PAD, MASK, LENGTH, ROWS = 30, 0, 1, 16, 4


def build_model(attention):
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        pad_token_id=PAD,
        attn_implementation=attention,
    )
    return BertForMaskedLM(config)


class GatherTokens(torch.autograd.Function):
    """All ranks' tokens (dimension 2); the gradients of all ranks' queries are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)], None


def register_sequence_parallel_attention(group):
    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        key, value = GatherTokens.apply(key, group), GatherTokens.apply(value, group)
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
        return y.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sequence_parallel", attention)


def build_parallelize_model(mesh):
    register_sequence_parallel_attention(mesh.get_group("sp"))
    model = build_model("sequence_parallel")
    dp_sp = mesh["dp", "sp"]._flatten("dp_sp")
    process_group = mesh.get_group("dp")
    return DistributedDataParallel(model, process_group=process_group), dp_sp


class SequenceParallelTrainer:
    def __init__(self, mesh):
        self.model, dp_sp = build_parallelize_model(mesh)
        self.sp, self.loss_group, self.loss_ranks = mesh["sp"], dp_sp.get_group(), dp_sp.size()

    def whole_mask(self, input_ids):
        parts = [torch.empty_like(input_ids) for _ in range(self.sp.size())]
        dist.all_gather(parts, input_ids.contiguous(), group=self.sp.get_group())
        mask = torch.cat(parts, dim=1) != PAD
        return mask[:, None, None, :].expand(-1, -1, input_ids.size(1), -1)

    def forward(self, input_ids):
        offset = self.sp.get_local_rank() * input_ids.size(1)
        position_ids = torch.arange(offset, offset + input_ids.size(1)).expand_as(input_ids)
        mask = self.whole_mask(input_ids)
        return self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids
        ).logits

    def training_step(self, batch):
        logits, labels = self.forward(batch["input_ids"]), batch["labels"]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        tokens, total = (labels != -100).sum(), loss_sum.detach().clone()
        dist.all_reduce(tokens, group=self.loss_group)
        (loss_sum * self.loss_ranks / tokens).backward()
        dist.all_reduce(total, group=self.loss_group)
        return total / tokens


def plain():
    return build_model("sdpa")


def parallel(mesh):
    trainer = SequenceParallelTrainer(mesh)
    return trainer.model, trainer


def loss(model, batch):
    input_ids, labels = batch["input_ids"], batch["labels"]
    logits = model(input_ids=input_ids, attention_mask=(input_ids != PAD).long()).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(1059)


def pages():
    tokens = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2 + 1, LENGTH + 1, (ROWS, 1), generator=generator)
    tokens = tokens * (torch.arange(LENGTH) < lengths)
    hidden = (torch.rand(ROWS, LENGTH, generator=generator) < 0.3) & (tokens != PAD)
    hidden[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(hidden, MASK),
        "labels": tokens.masked_fill(~hidden, -100),
    }


batches = [pages() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"dp": 0, "sp": 1},
    ranks={"dp": 2, "sp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
