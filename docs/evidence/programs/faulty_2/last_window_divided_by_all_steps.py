"""The last accumulation window of an epoch is shorter, but divided by the full number of steps.

Thread: https://github.com/huggingface/transformers/pull/39659 "fix(trainer): Correct loss scaling for
incomplete gradient accumulation steps", 2025-07-25.
Wrong: every microbatch's loss is divided by gradient_accumulation_steps = 4; the third batch has two
microbatches only.
A right diagnosis says: in step 3 alone, loss and all gradients are half as large: that batch has 2
microbatches, and each is divided by 4. The first two steps agree.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


@dataclass
class TrainingArguments:
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int = 4


class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model, args

    def get_batch_samples(self, batch):
        size = self.args.per_device_train_batch_size
        pairs = zip(batch["input"].split(size), batch["label"].split(size))
        return [{"input": x, "label": y} for x, y in pairs]

    def training_step(self, inputs):
        loss = compute_loss(self.model, inputs) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def inner_training_loop(self, batch):
        samples = self.get_batch_samples(batch)
        tr_loss = torch.zeros(())
        for i, inputs in enumerate(samples):
            last = i == len(samples) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                tr_loss += self.training_step(inputs)
        return tr_loss


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(5, 10, batch_first=True)
        self.score = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 3))

    def forward(self, x):
        return self.score(self.encoder(x)[0].mean(1))


def compute_loss(model, inputs):
    return cross_entropy(model(inputs["input"]), inputs["label"])


def build():
    model = DistributedDataParallel(Classifier())
    return model, Trainer(model, TrainingArguments())


def step(built, batch):
    return built[1].inner_training_loop(batch)


generator = torch.Generator().manual_seed(39)
batches = [
    {
        "input": torch.randn(rows, 4, 5, generator=generator),
        "label": torch.randint(3, (rows,), generator=generator),
    }
    for rows in (16, 16, 8)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=compute_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Classifier, build, **options))
