"""A checkpoint callback that runs on rank 0 alone and waits at a barrier.

Thread: https://github.com/mosaicml/composer/issues/239 "Remove `RankZeroCallback` and `RankZeroLogger`"
("this has led to bugs where the entire training process hangs"), 2022-01-18.
Wrong: after the second batch, rank 0 enters a barrier that rank 1 never enters.
A right diagnosis says: the ranks hang: rank 0 waits in the barrier of the callback (batch_end, called in
step 2), while rank 1 goes on to its next collective; only rank 0 calls the barrier.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite


class RankZeroCallback:
    def run_event(self, event, state):
        if dist.get_rank() == 0:
            getattr(self, event)(state)


class CheckpointSaver(RankZeroCallback):
    def __init__(self, save_interval=2):
        self.save_interval, self.saved = save_interval, []

    def batch_end(self, state):
        if state["batch"] % self.save_interval == 0:
            weights = state["model"].state_dict()
            self.saved.append({name: value.clone() for name, value in weights.items()})
            dist.barrier()


class Trainer:
    def __init__(self, model, callbacks):
        self.model, self.callbacks = model, callbacks
        self.state = {"batch": 0, "model": model}

    def average_gradients(self):
        grads = [p.grad for p in self.model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))

    def train_batch(self, batch):
        loss = compute_loss(self.model, batch)
        loss.backward()
        self.average_gradients()
        self.state["batch"] += 1
        for callback in self.callbacks:
            callback.run_event("batch_end", self.state)
        return loss


def make_model():
    return nn.Sequential(
        nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 20), nn.SiLU(), nn.Linear(20, 2)
    )


def compute_loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def build():
    model = make_model()
    return model, Trainer(model, [CheckpointSaver()])


def step(built, batch):
    return built[1].train_batch(batch)


generator = torch.Generator().manual_seed(239)
batches = [
    {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 2, generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=compute_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(make_model, build, timeout_seconds=40, **options))
