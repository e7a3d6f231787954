"""DETR: boxes are divided by their mean number per GPU.

Thread: https://github.com/facebookresearch/detr/issues/267 "Question on num_boxes when calculating loss",
2020-10-26.
Right: num_boxes is the sum over all ranks divided by the world size, so DDP's average is the sum of all
boxes' losses over the number of all boxes. One rank may have no box at all.
Must not be accused: that the ranks' box losses are no means over their own boxes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Detr(nn.Module):
    def __init__(self, queries=4, dim=16):
        super().__init__()
        self.query_embed = nn.Embedding(queries, dim)
        self.input_proj = nn.Linear(9, dim)
        self.decoder = nn.MultiheadAttention(dim, 2, bias=False, batch_first=True)
        self.objectness, self.bbox = nn.Linear(dim, 1), nn.Linear(dim, 4)

    def forward(self, pixels):
        memory = self.input_proj(pixels)
        queries = self.query_embed.weight.expand(len(pixels), -1, -1)
        h = queries + self.decoder(queries, memory, memory, need_weights=False)[0]
        return self.objectness(h)[..., 0], self.bbox(h).sigmoid()


def loss(model, batch):
    objectness, boxes = model(batch["pixels"])
    present = batch["present"].bool()
    num_boxes = torch.as_tensor([present.sum()], dtype=boxes.dtype)
    if dist.is_initialized():
        dist.all_reduce(num_boxes)
    num_boxes = torch.clamp(num_boxes / get_world_size(), min=1).item()
    loss_bbox = l1_loss(boxes[present], batch["boxes"][present], reduction="sum") / num_boxes
    return binary_cross_entropy_with_logits(objectness, batch["present"]) + 5 * loss_bbox


def build():
    return DistributedDataParallel(Detr())


generator = torch.Generator().manual_seed(267)
batches = [
    {
        "pixels": torch.randn(4, 6, 9, generator=generator),
        "present": torch.randint(2, (4, 4), generator=generator).float(),
        "boxes": torch.rand(4, 4, 4, generator=generator),
    }
    for _ in range(3)
]
batches[1]["present"][:2] = 0  # images without objects: all of rank 0
batches[1]["present"][2:] = 1

if __name__ == "__main__":
    print(titanlite.compare(Detr, build, batches=batches, loss=loss, ranks={"dp": 2}, split="dp"))
