"""Adapters of six tuning jobs, trained at once on one frozen base by vmap; ranks hold adapters of their own jobs.

Thread: huggingface/peft issue #631 "How to train multiple LoRAs at once?" (2023), with an adapter for each of several
users on one base model, kept in memory once.
Correct: the adapters are stacked along a first dimension, which is mapped over together with the rows of their jobs, so
no gradient passes from job to job, and ranks with different jobs have nothing to reduce. Ranks that share jobs have
different rows of each, and the mean of their gradients is taken by a hook on the stack, when its gradient is complete.
Each job has a weight and is clipped by its own norm; the number that clip returns is the norm over all jobs of all
ranks. A finished job has weight zero: its gradients are zero. A rank's loss is the sum over its jobs of the means over
its rows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, vmap

import titanlite

VOCAB, WIDTH, LAYERS, RANK, JOBS, LENGTH, ROWS = 28, 16, 2, 2, 6, 7, 4


class Layer(nn.Module):
    """A gated mixer over the past, with an adapter on each projection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, adapter):
        y = self.norm(x)
        y = self.into(y) + y @ adapter["into_a"] @ adapter["into_b"]
        gate, y = y.chunk(2, dim=-1)
        decay = 0.7 ** (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(min=0)
        y = F.silu(gate) * (decay.tril() @ y)
        return x + self.out(y) + y @ adapter["out_a"] @ adapter["out_b"]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, adapters):
        x = self.words(tokens)
        for i, layer in enumerate(self.layers):
            own = {name[2:]: value for name, value in adapters.items() if name[0] == str(i)}
            x = layer(x, own)
        return self.head(x)


class ManyJobs(nn.Module):
    """All jobs' adapters, or (from a rank's mesh) those of its own jobs."""

    def __init__(self):
        super().__init__()
        self.base = Base().requires_grad_(False)
        shapes = dict(into_a=(WIDTH, RANK), into_b=(RANK, 2 * WIDTH))
        shapes |= dict(out_a=(WIDTH, RANK), out_b=(RANK, WIDTH))
        self.adapters = nn.ParameterDict()
        for i in range(LAYERS):
            for name, shape in shapes.items():
                # B isn't zero here: the jobs go on from earlier runs
                self.adapters[f"{i}_{name}"] = nn.Parameter(torch.randn(JOBS, *shape) / 4)
        self.jobs_group = None

    def keep(self, mesh):
        jobs, rows = mesh["jobs"], mesh.get_group("rows")
        self.jobs_group = jobs.get_group()

        def mean_over_rows(stack):
            dist.all_reduce(stack.grad, group=rows)
            stack.grad.div_(dist.get_world_size(rows))

        for name, stack in self.adapters.items():
            own = nn.Parameter(stack.detach().chunk(jobs.size())[jobs.get_local_rank()].clone())
            own.register_post_accumulate_grad_hook(mean_over_rows)
            self.adapters[name] = own
        return self

    def forward(self, tokens, targets, weights):
        frozen = dict(self.base.named_parameters())

        def job_loss(adapters, tokens, targets):
            logits = functional_call(self.base, frozen, (tokens, adapters))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        losses = vmap(job_loss)(dict(self.adapters.items()), tokens, targets)
        return losses @ weights[:, 0]

    @torch.no_grad()
    def clip_jobs(self, limit):
        grads = [stack.grad for stack in self.adapters.values()]
        squares = sum(grad.flatten(1).square().sum(1) for grad in grads)
        factors = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factors[:, None, None])
        total = squares.sum()
        if self.jobs_group is not None:
            dist.all_reduce(total, group=self.jobs_group)
        return total.sqrt()


def plain():
    return ManyJobs()


def parallel(mesh):
    return ManyJobs().keep(mesh)


def loss(model, batch):
    return model(batch["tokens"], batch["targets"], batch["weights"])


def step(model, part):
    value = loss(model, part)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(631)


def rows_of_jobs(finished):
    words = torch.randint(0, VOCAB, (JOBS, ROWS, LENGTH + 1), generator=generator)
    weights = torch.rand(JOBS, 1, generator=generator, dtype=torch.float64) + 0.5
    weights[list(finished)] = 0.0
    weights = weights.expand(-1, ROWS).contiguous()  # as the rows are cut like the tokens
    return {"tokens": words[..., :-1], "targets": words[..., 1:], "weights": weights}


batches = [rows_of_jobs(finished) for finished in ((4,), (4, 5), (4, 5))]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    clip=lambda model: model.clip_jobs(0.1),
    split={"jobs": 0, "rows": 1},
    ranks={"jobs": 3, "rows": 2},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
