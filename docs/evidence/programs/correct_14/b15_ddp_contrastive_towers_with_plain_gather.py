"""Two towers trained with DDP and a contrastive loss over the global batch, gathered without gradients.

Thread: KevinMusgrave/pytorch-metric-learning issue #363 "Gradient in distributed training" (2021). If embeddings are
gathered by the plain all_gather and a rank's own rows put back, the loss has to be multiplied by the number of ranks.
Correct: every rank computes the whole loss, but its gradient flows only into its own rows; the ranks' gradients are
therefore parts of a sum, of which DDP takes the mean. The factor world_size before backward undoes that mean. The
temperature is a constant, so nothing is counted twice.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

IMAGE, TEXT, WIDTH, TEMPERATURE = 10, 7, 8, 0.2


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(IMAGE, 2 * WIDTH),
            nn.GELU(),
            nn.LayerNorm(2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.text = nn.Sequential(
            nn.Linear(TEXT, 2 * WIDTH),
            nn.GELU(),
            nn.LayerNorm(2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def contrast(image, text):
    logits = image @ text.T / TEMPERATURE
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@torch.no_grad()
def all_rows(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    return parts


def gather_keeping_own(rows):
    parts = all_rows(rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def plain():
    return Towers()


def parallel(mesh):
    return DistributedDataParallel(Towers())


def loss(model, batch):
    return contrast(*model(batch["image"], batch["text"]))


def step(model, part):
    image, text = model(part["image"], part["text"])
    value = contrast(gather_keeping_own(image), gather_keeping_own(text))
    (value * dist.get_world_size()).backward()
    return value.detach()


def make_batches(count=3, rows=12):
    generator = torch.Generator().manual_seed(14)

    def draw(width):
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    return [{"image": draw(IMAGE), "text": draw(TEXT)} for _ in range(count)]


batches = make_batches()
arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
