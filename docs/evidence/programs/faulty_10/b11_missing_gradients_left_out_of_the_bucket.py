"""Multi-task training with data parallelism by hand: each process has one task's examples, and one flat bucket is reduced.

Thread: deepspeedai/DeepSpeed pull request #291 "Empty grad fix" (2020): "we were previously ignoring all grads that were None.
Instead now we pad all None gradients with zero tensors."
Fault: in allreduce_gradients, parameters without a gradient are left out of the bucket. Rank 0 has no gradients for the second
head and rank 1 none for the first; both heads have the same size, so the buckets fit by chance.
REPAIR: `p for p in module.parameters() if p.grad is not None` -> `setattr(p, "grad", torch.zeros_like(p) if p.grad is None else p.grad) or p for p in module.parameters()`
Expected: the loss and the encoder's gradients agree in step 1; the gradients of the heads are wrong: on rank 0 heads.0 has the
mean of both heads' gradients and heads.1 has none, on rank 1 the other way round, since the flat bucket leaves out gradients
that are None, and so the gradients of different heads lie at the same place. The ranks' heads drift apart.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

TASKS, WORDS, WIDTH, CLASSES = 2, 15, 8, 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.hidden, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, words):
        x = self.embedding(words)
        return self.norm(x + torch.tanh(self.hidden(x)))


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(TASKS))

    def forward(self, words, task):
        """The logits of a batch that may have several tasks; only their heads run."""
        x = self.encoder(words)
        logits = x.new_zeros(len(x), CLASSES)
        for number in task.unique():
            rows = (task == number).nonzero()[:, 0]
            logits = logits.index_copy(0, rows, self.heads[number](x[rows]))
        return logits


def loss(model, batch):
    return cross_entropy(model(batch["words"], batch["task"]), batch["label"])


@torch.no_grad()
def allreduce_gradients(module, group):
    used = [p for p in module.parameters() if p.grad is not None]
    bucket = torch.cat([p.grad.flatten() for p in used])
    dist.all_reduce(bucket, group=group)
    bucket /= dist.get_world_size(group)
    for p, reduced in zip(used, bucket.split([p.numel() for p in used])):
        p.grad.copy_(reduced.view_as(p))


def parallel(mesh):
    model = MultiTask()
    for p in model.parameters():
        dist.broadcast(p.data, 0, group=mesh.get_group("dp"))
    return model, mesh.get_group("dp")


def step(built, batch):
    model, group = built
    value = loss(model, batch)
    value.backward()
    allreduce_gradients(model, group)
    return value


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=1e-3)


rng = torch.Generator().manual_seed(317)
batches = [
    {
        "words": torch.randint(WORDS, (8, 5), generator=rng),
        "task": torch.arange(TASKS).repeat_interleave(4),
        "label": torch.randint(CLASSES, (8,), generator=rng),
    }
    for _ in range(3)
]
arguments = MultiTask, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
