"""CLIP's loss over features gathered with gradients, the same on every rank.

Thread: https://github.com/mlfoundations/open_clip/issues/616 "`gather-with-grad` without
`local-loss`?", 2023-09-01.
Right: the gather's backward sums the ranks' gradients, so each rank's are world-size times those of
its own part, and DDP's average takes the factor out again.
Must not be accused: the gather (a factor of the degree of dp), or the loss that every rank computes
in full.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class CLIP(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, dim))
        self.textual = nn.Sequential(nn.EmbeddingBag(30, 24), nn.GELU(), nn.Linear(24, dim))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        image, text = self.visual(image), self.textual(text)
        return normalize(image, dim=-1), normalize(text, dim=-1), self.logit_scale.exp()


def clip_loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    if dist.is_initialized():
        image, text = (torch.cat(dist_nn.all_gather(x)) for x in (image, text))
    logits = scale * image @ text.t()
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2


def build():
    return DDP(CLIP())


generator = torch.Generator().manual_seed(11)
batches = [
    {
        "image": torch.randn(8, 20, generator=generator),
        "text": torch.randint(30, (8, 5), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=clip_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(CLIP, build, **options))
