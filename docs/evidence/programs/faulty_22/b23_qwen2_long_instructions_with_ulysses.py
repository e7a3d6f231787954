"""Instruction tuning of a Qwen2 on long samples; Ulysses sequence parallelism is an attention function of transformers.

Thread: modelscope/ms-swift pull request #10185 "fix(loss): reuse aligned cross entropy under sequence parallelism"
(2026): the explicit loss type cross_entropy shifts again the labels that sequence parallelism has already shifted and
sharded.
Fault: SequenceParallelTrainer.compute_loss takes the loss from LOSSES["cross_entropy"], which shifts logits against
labels, though prepare_inputs has already shifted the labels of the whole sample before cutting it; each token learns
the word after the next, and the last position of each rank's shard is dropped.
REPAIR: `loss_sum = LOSSES[self.loss_type](logits, labels)` -> `loss_sum = aligned_cross_entropy(logits, labels)`
A right first sentence says: the labels are shifted twice under sequence parallelism (once before the cut, once more
in the loss), so every rank trains on targets one token too far and loses the last one of its shard.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

import titanlite

VOCAB, LENGTH, ROWS = 26, 16, 3


def build_model(attention):
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config)


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, scatter, gather):
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        parts = torch.stack(x.chunk(dist.get_world_size(group), scatter)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(0), gather)

    @staticmethod
    def backward(ctx, grad):
        return SeqAllToAll.apply(grad, ctx.group, ctx.gather, ctx.scatter), None, None, None


def register_ulysses(group):
    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        query, key, value = (SeqAllToAll.apply(x, group, 1, 2) for x in (query, key, value))
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return SeqAllToAll.apply(y, group, 2, 1).transpose(1, 2).contiguous(), None

    AttentionInterface.register("ulysses", attention)


def aligned_cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def causal_cross_entropy(logits, labels):
    return aligned_cross_entropy(logits[:, :-1], labels[:, 1:])


def causal_z_loss(logits, labels):
    penalty = logits[:, :-1].logsumexp(-1).square() * (labels[:, 1:] != -100)
    return causal_cross_entropy(logits, labels) + 1e-4 * penalty.sum()


LOSSES = {"cross_entropy": causal_cross_entropy, "z_loss": causal_z_loss}


class SequenceParallelTrainer:
    def __init__(self, model, mesh, loss_type="cross_entropy"):
        self.model, self.group, self.loss_type = model, mesh.get_group(), loss_type
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def local(self, x):
        return x.chunk(self.size, dim=1)[self.rank]

    def prepare_inputs(self, batch):
        input_ids, labels = batch["input_ids"], batch["labels"]
        position_ids = torch.arange(input_ids.size(1)).expand_as(input_ids)
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        inputs = dict(input_ids=self.local(input_ids), position_ids=self.local(position_ids))
        return inputs, self.local(labels), (labels != -100).sum()

    def compute_loss(self, batch):
        inputs, labels, num_items_in_batch = self.prepare_inputs(batch)
        logits = self.model(**inputs).logits
        loss_sum = LOSSES[self.loss_type](logits, labels)
        return loss_sum / num_items_in_batch

    def training_step(self, batch):
        value = self.compute_loss(batch)
        value.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
        total = value.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def plain():
    return build_model("sdpa")


def parallel(mesh):
    register_ulysses(mesh.get_group("sp"))
    model = build_model("ulysses")
    return model, SequenceParallelTrainer(model, mesh["sp"])


def loss(model, batch):
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    return LOSSES["cross_entropy"](logits, labels) / (labels[:, 1:] != -100).sum()


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(10185)


def conversations():
    input_ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    prompts = torch.randint(2, LENGTH // 2, (ROWS, 1), generator=generator)
    return {
        "input_ids": input_ids,
        "labels": input_ids.masked_fill(torch.arange(LENGTH) < prompts, -100),
    }


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"sp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
