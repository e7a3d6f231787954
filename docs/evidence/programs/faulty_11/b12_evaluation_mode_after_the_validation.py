"""DDP with a validation in the middle of an epoch, after which the model goes back to the mode that it was in.

Thread: joeynmt/joeynmt issue #184 "model.eval()" (2022): "After validate on the dev data and come back to train, the model is
still on the `model.eval()` state", and pfnet/pytorch-pfn-extras issue #688 "Recovering the mode of the model after running
evaluator" (2023).
Fault: in validate, the mode is read after model.eval(), so it is always False, and the training goes on without dropout until
the next epoch begins.
REPAIR: `was_training = model.training` -> `was_training = True`
A right first sentence says: steps 1 and 2 agree; in step 3, the first step after validate, the output of dropout1 is wrong on all
ranks, its input agrees: the model is in evaluation mode (dropout does nothing), as validate does not set it back to training.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, elu
from torch.nn.parallel import DistributedDataParallel

import titanlite

FEATURES, WIDTH, CLASSES, EPOCH, VALIDATE_EVERY, RATE = 6, 10, 4, 4, 2, 0.4


class Dropout(nn.Module):
    """The mask comes with the rows, drawn by the loader."""

    def forward(self, x, mask):
        return x * mask / (1 - RATE) if self.training else x


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.hidden = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout1, self.dropout2 = Dropout(), Dropout()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, masks):
        x = self.dropout1(elu(self.encode(x)), masks[:, 0])
        x = self.dropout2(x + elu(self.hidden(self.norm(x))), masks[:, 1])
        return self.out(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"], batch["masks"]), batch["tag"])


class Trainer:
    def __init__(self, model):
        generator = torch.Generator().manual_seed(7)
        self.model, self.steps = model, 0
        self.development = {
            "x": torch.randn(4, FEATURES, generator=generator),
            "masks": torch.ones(4, 2, WIDTH),
            "tag": torch.arange(4) % CLASSES,
        }

    @torch.no_grad()
    def validate(self):
        model = self.model.module
        model.eval()
        was_training = model.training
        self.score = loss(model, self.development)
        model.train(was_training)

    def train_step(self, batch):
        if self.steps % EPOCH == 0:
            self.model.train()
        elif self.steps % VALIDATE_EVERY == 0:
            self.validate()
        value = loss(self.model, batch)
        value.backward()
        self.steps += 1
        return value


def parallel(mesh):
    model = DistributedDataParallel(Tagger(), process_group=mesh.get_group("dp"))
    return model, Trainer(model)


def step(built, batch):
    return built[1].train_step(batch)


rng = torch.Generator().manual_seed(408)


def draw():
    return {
        "x": torch.randn(8, FEATURES, generator=rng),
        "masks": (torch.rand(8, 2, WIDTH, generator=rng) >= RATE).float(),
        "tag": torch.randint(CLASSES, (8,), generator=rng),
    }


batches = [draw() for _ in range(4)]
arguments = Tagger, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
