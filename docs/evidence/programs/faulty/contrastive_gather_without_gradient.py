"""A contrastive loss over gathered features, of which only the rank's own have a gradient.

Thread: https://github.com/JohnGiorgi/DeCLUTR/pull/212 "Rescale gradients", 2021-05-08; also
https://github.com/kohjingyu/fromage/issues/33 (2023-10-31).
Wrong: every rank computes the loss of the whole batch, but its gradient reaches only its own
features; DDP then averages, so gradients are divided by the number of ranks once too often.
A right diagnosis says: all gradients are 0.5 times as large, and 0.5 is 1 over the degree of dp. The
loss agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class TwoTowers(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, dim))
        self.text = nn.Sequential(nn.EmbeddingBag(30, 24), nn.GELU(), nn.Linear(24, dim))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        image, text = normalize(self.image(image), dim=-1), normalize(self.text(text), dim=-1)
        return image, text, self.logit_scale.exp()


def all_gather(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    gathered[dist.get_rank()] = tensor  # keeps the gradient of the rank's own features
    return torch.cat(gathered)


def clip_loss(model, batch):
    image, text, scale = model(batch["image"], batch["text"])
    if dist.is_initialized():
        image, text = all_gather(image), all_gather(text)
    logits = scale * image @ text.t()
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2


def build():
    return DDP(TwoTowers())


generator = torch.Generator().manual_seed(4)
batches = [
    {
        "image": torch.randn(8, 20, generator=generator),
        "text": torch.randint(30, (8, 5), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=clip_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(TwoTowers, build, **options))
