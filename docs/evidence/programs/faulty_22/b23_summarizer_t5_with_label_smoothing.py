"""A T5 summarizer trained as transformers' Seq2SeqTrainer does: DDP, accumulated micro-batches, smoothed labels.

Thread: huggingface/transformers issue #46731 "LabelSmoother ignores num_items_in_batch, inflating gradients by
~gradient_accumulation_steps with label smoothing" (2026).
Fault: Trainer.compute_loss doesn't hand num_items_in_batch to the label smoother, which then takes the mean over the
micro-batch's own target tokens; as the loss counts as normalized by num_items_in_batch, nothing divides it by the
accumulation steps any more, and it is even multiplied by the number of processes.
REPAIR: `loss = self.smoother(outputs, labels)` -> `loss = self.smoother(outputs, labels, num_items_in_batch)`
A right first sentence says: the label smoothing loss is a mean over each micro-batch's own tokens instead of a sum
divided by the token count of the whole accumulated global batch, so loss and gradients are too large by about the
accumulation steps times ranks.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration

import titanlite

VOCAB, PAD, SOURCE, TARGET = 30, 0, 12, 8
ROWS, MICRO_ROWS, EPSILON, MAX_NORM = 8, 2, 0.1, 1.0


class LabelSmoother:
    def __init__(self, epsilon=EPSILON, ignore_index=-100):
        self.epsilon, self.ignore_index = epsilon, ignore_index

    def __call__(self, outputs, labels, num_items_in_batch=None):
        log_probs = -outputs.logits.log_softmax(-1)
        labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        nll_loss = log_probs.gather(-1, labels.clamp(min=0)).masked_fill(padding_mask, 0.0)
        smoothed_loss = log_probs.sum(-1, keepdim=True).masked_fill(padding_mask, 0.0)
        if num_items_in_batch is None:
            num_items_in_batch = padding_mask.numel() - padding_mask.sum()
        nll_loss = nll_loss.sum() / num_items_in_batch
        smoothed_loss = smoothed_loss.sum() / (num_items_in_batch * log_probs.size(-1))
        return (1 - self.epsilon) * nll_loss + self.epsilon * smoothed_loss


def build_model():
    config = T5Config(
        vocab_size=VOCAB,
        **dict(d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4),
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
    )
    return T5ForConditionalGeneration(config)


def shift_right(labels):
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = PAD
    return shifted.masked_fill(shifted == -100, PAD)


class Trainer:
    def __init__(self, model, group, gradient_accumulation_steps):
        self.model, self.group = DistributedDataParallel(model, process_group=group), group
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.smoother = LabelSmoother()

    def get_batch_samples(self, batch):
        parts = {name: values.split(MICRO_ROWS) for name, values in batch.items()}
        samples = [dict(zip(parts, values)) for values in zip(*parts.values())]
        num_items_in_batch = sum((sample["labels"] != -100).sum() for sample in samples)
        dist.all_reduce(num_items_in_batch, group=self.group)
        return samples, num_items_in_batch

    def compute_loss(self, inputs, num_items_in_batch):
        labels = inputs["labels"]
        outputs = self.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=shift_right(labels),
            use_cache=False,
        )
        loss = self.smoother(outputs, labels)
        # the average over tokens goes across devices, while DDP averages the gradients
        return loss * dist.get_world_size(self.group)

    def training_step(self, inputs, num_items_in_batch):
        loss = self.compute_loss(inputs, num_items_in_batch)
        if num_items_in_batch is None:
            loss = loss / self.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train_batch(self, batch):
        samples, num_items_in_batch = self.get_batch_samples(batch)
        total = torch.zeros(())
        for i, inputs in enumerate(samples):
            last = i == len(samples) - 1
            with nullcontext() if last else self.model.no_sync():
                total += self.training_step(inputs, num_items_in_batch)
        dist.all_reduce(total, group=self.group)
        return total / dist.get_world_size(self.group)


def plain():
    return build_model()


def parallel(mesh):
    trainer = Trainer(build_model(), mesh.get_group("dp"), ROWS // mesh["dp"].size() // MICRO_ROWS)
    return trainer.model, trainer


def loss(model, batch):
    labels = batch["labels"]
    outputs = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=shift_right(labels),
        use_cache=False,
    )
    return LabelSmoother()(outputs, labels)


def step(built, batch):
    return built[1].train_batch(batch)


generator = torch.Generator().manual_seed(46731)


def articles():
    lengths = torch.randint(4, SOURCE + 1, (ROWS, 1), generator=generator)
    summary_lengths = torch.randint(2, TARGET + 1, (ROWS, 1), generator=generator)
    source = torch.randint(1, VOCAB, (ROWS, SOURCE), generator=generator)
    mask = torch.arange(SOURCE) < lengths
    target = torch.randint(1, VOCAB, (ROWS, TARGET), generator=generator)
    labels = target.masked_fill(torch.arange(TARGET) >= summary_lengths, -100)
    return {"input_ids": source * mask, "attention_mask": mask.long(), "labels": labels}


batches = [articles() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    microbatches=2,
    clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
