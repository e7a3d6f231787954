"""A tagger of sound events on mel spectrograms, two ranks with two chunks each, by torch.distributed.pipelining.

Might be accused because: the loss is averaged in each micro-batch and the schedule adds the gradients of all of them;
no code here divides them. The optimizers of the ranks clip gradients without any communication. The chunks of a rank
aren't neighbours, the attention pooling uses a query that only the last chunk has, and the tags are weighted by counts
of the whole batch.
Correct because: scale_grads is on by default, so the schedule divides the gradients by the number of micro-batches,
which are of equal size; the clipping works on elements and needs no norm; chunk i runs on rank i modulo 2, as the
interleaved schedule wants it; the weights of the tags come with the targets and are the same for every micro-batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import titanlite

MELS, FRAMES, WIDTH, TAGS, ROWS, CHUNKS, MICROBATCHES = 8, 12, 12, 5, 8, 4, 4
MAX_VALUE = 0.02


class Mixer(nn.Module):
    """A depthwise convolution over time and a feed-forward layer."""

    def __init__(self, dilation):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation, groups=WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + F.silu(self.conv(self.norm1(x).mT).mT)
        return x + self.fc2(F.silu(self.fc1(self.norm2(x))))


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.positions = (
            nn.Linear(MELS, WIDTH),
            nn.Parameter(torch.randn(FRAMES, WIDTH) * 0.1),
        )

    def forward(self, spectrogram):
        return self.proj(spectrogram) + self.positions


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.randn(WIDTH)), nn.LayerNorm(WIDTH)
        self.tags = nn.Linear(WIDTH, TAGS)

    def forward(self, x):
        x = self.norm(x)
        weights = (x @ self.query / WIDTH**0.5).softmax(1)
        return self.tags((weights.unsqueeze(-1) * x).sum(1))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.chunks = nn.ModuleDict(
            {str(i): nn.Sequential(Mixer(1), Mixer(2)) for i in range(CHUNKS)}
        )
        self.chunks["0"].insert(0, Patches())
        self.chunks[str(CHUNKS - 1)].append(Pooling())

    def forward(self, x):
        for chunk in self.chunks.values():
            x = chunk(x)
        return x


def tag_loss(logits, targets):
    """The targets come with the weights of the tags, in rows of their own: (rows, 2, tags)."""
    labels, weights = targets.unbind(1)
    return F.binary_cross_entropy_with_logits(logits, labels, weight=weights)


class PipelinedTagger:
    def __init__(self, model, mesh):
        rank, ranks, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self.first, self.last = rank == 0, rank == ranks - 1
        for index in range(CHUNKS):
            if index % ranks != rank:
                del model.chunks[str(index)]
        stages = [
            PipelineStage(chunk, int(index), CHUNKS, torch.device("cpu"), group=self.group)
            for index, chunk in model.chunks.items()
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=tag_loss)

    def step(self, spectrograms, targets):
        losses = []
        arguments = (spectrograms,) if self.first else ()
        keywords = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*arguments, **keywords)
        value = torch.stack(losses).mean().detach() if self.last else torch.zeros(())
        dist.all_reduce(value, group=self.group)
        return value


class ValueClippedSGD(torch.optim.SGD):
    """Cuts off the elements of the gradients before each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], MAX_VALUE)
        return super().step(closure)


def plain():
    return Tagger()


def parallel(mesh):
    model = Tagger()
    return model, PipelinedTagger(model, mesh["pp"])


def loss(model, batch):
    spectrograms, targets = batch
    return tag_loss(model(spectrograms), targets)


def step(built, batch):
    return built[1].step(*batch)


generator = torch.Generator().manual_seed(23)


def recordings():
    labels = (torch.rand(ROWS, TAGS, generator=generator) < 0.4).double()
    sounds = torch.randn(ROWS, FRAMES, MELS, generator=generator, dtype=torch.float64)
    sounds[:, 3:9, :TAGS] += labels.unsqueeze(1)
    weights = ROWS / (1 + labels.sum(0))
    return sounds, torch.stack([labels, weights.expand(ROWS, -1)], dim=1)


batches = [recordings() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    microbatches=MICROBATCHES,
    optimizer=lambda parameters: ValueClippedSGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
