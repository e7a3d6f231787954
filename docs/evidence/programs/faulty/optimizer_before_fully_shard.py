"""An optimizer that was created before FSDP2 replaced the parameters.

Thread: https://github.com/huggingface/accelerate/issues/3256 "[BUG] [Fix-Suggested] Model Training
Stalls with FSDP ... due to inconsistent model-optimizer state", 2024-11-24; also
https://github.com/pytorch/pytorch/issues/149205 (2025-03-14).
Wrong: the optimizer holds the parameters from before fully_shard. They have no gradients, so
nothing is trained.
A right diagnosis says: gradients agree, but no weight changes: the optimizer does not hold the
model's parameters (it was created before they were replaced).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.score = nn.Linear(16, 4)

    def forward(self, input_ids):
        return self.score(self.encoder(self.embed(input_ids)).mean(1))


def loss(model, batch):
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def grouped_parameters(model):
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    no_decay = [p for n, p in model.named_parameters() if "bias" in n]
    return [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.01}]


def prepare(mesh):
    model = Classifier()
    optimizer = torch.optim.AdamW(grouped_parameters(model), lr=1e-3)
    fully_shard(model.encoder, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer


def train_step(built, batch):
    model, _ = built
    value = loss(model, batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(3)
batches = [
    {
        "input_ids": torch.randint(30, (6, 9), generator=generator),
        "labels": torch.randint(4, (6,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Classifier,
            prepare,
            batches=batches,
            loss=loss,
            ranks={"dp": 2},
            split="dp",
            step=train_step,
        )
    )
