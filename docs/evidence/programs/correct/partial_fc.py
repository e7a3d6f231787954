"""A face-recognition head sharded by classes over the data-parallel ranks.

Thread: https://github.com/deepinsight/insightface/issues/1620 "Do we really need multiplication?",
2021-06-30; also https://github.com/Tencent/TFace/issues/34 (2021-10-02).
Right: the gathered features' gradient is summed over the class shards and multiplied by the world
size, because DDP averages the backbone's gradients of a loss that is already the global mean.
Must not be accused: the multiplication by the world size; the head, whose shards are not averaged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

CLASSES, DIM = 12, 8


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        n = dist.get_world_size()
        return grad.chunk(n)[dist.get_rank()] * n


class PartialCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        size = logits.shape[1]
        local = labels - dist.get_rank() * size
        mine = (local >= 0) & (local < size)
        peak = logits.max(1).values
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        exp = (logits - peak[:, None]).exp()
        total = exp.sum(1)
        dist.all_reduce(total)
        picked = torch.zeros_like(total)
        picked[mine] = logits[mine, local[mine]]
        dist.all_reduce(picked)
        ctx.save_for_backward(exp / total[:, None], mine, local)
        return (total.log() + peak - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        probs, mine, local = ctx.saved_tensors
        result = probs.clone()
        result[mine, local[mine]] -= 1
        return result * grad / len(probs), None


def make_backbone():
    return nn.Sequential(nn.Linear(10, 16), nn.PReLU(), nn.Linear(16, DIM))


class FaceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = make_backbone()
        self.fc = nn.Linear(DIM, CLASSES, bias=False)


def plain_loss(model, batch):
    return cross_entropy(model.fc(model.backbone(batch["image"])), batch["label"])


def build():
    model = FaceModel()
    n, rank = dist.get_world_size(), dist.get_rank()
    model.fc = nn.Linear(DIM, CLASSES // n, bias=False)
    torch.manual_seed(0)
    model.fc.weight.data = FaceModel().fc.weight.data.chunk(n)[rank].clone()
    model.backbone = DDP(model.backbone)
    return model


def step(model, batch):
    features = AllGather.apply(model.backbone(batch["image"]))
    labels = [torch.empty_like(batch["label"]) for _ in range(dist.get_world_size())]
    dist.all_gather(labels, batch["label"])
    loss = PartialCrossEntropy.apply(model.fc(features), torch.cat(labels))
    loss.backward()
    return loss


generator = torch.Generator().manual_seed(11)
batches = [
    {
        "image": torch.randn(8, 10, generator=generator),
        "label": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(FaceModel, build, **options))
