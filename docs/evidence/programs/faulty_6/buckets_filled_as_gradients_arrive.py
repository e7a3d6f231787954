"""ZeRO-2's way to reduce: gradients are put in a bucket in the order in which they arrive.

Thread: https://github.com/deepspeedai/DeepSpeed/issues/2343 "[BUG] Stage2 would get faulty gradient if parameters on
different ranks get their gradients on different order.", 2022-09-22 (and
https://github.com/pytorch/pytorch/issues/64629 of 2021-09-08, of FSDP).
Wrong: the model encodes the modalities in the order in which they first come up in the rank's rows, so backward
reaches their encoders in other orders on the ranks. The encoders have equal shapes: the sum adds the gradient of the
audio encoder of one rank to that of the text encoder of the other.
EXPECT: the gradients of encoders.audio, encoders.image and encoders.text differ: gradients of different parameters
(other encoders of the same shape) are added across the ranks, as the bucket is filled in the order of arrival, which
is not the same on all ranks. The head's and norm's agree, and so does the forward pass of step 1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

INPUTS, DIM, CLASSES, BUCKET_SIZE = 7, 12, 4, 300
MODALITIES = "text", "image", "audio"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(INPUTS, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class MultiModal(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleDict({name: Encoder() for name in MODALITIES})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x, modality):
        out, places = [], []
        for i in dict.fromkeys(modality.tolist()):
            rows = (modality == i).nonzero().squeeze(1)
            out.append(self.encoders[MODALITIES[i]](x[rows]))
            places.append(rows)
        return self.head(self.norm(torch.cat(out)[torch.cat(places).argsort()]))


class ReduceBucket:
    def __init__(self, module, group):
        self.group, self.arrived, self.elements = group, [], 0
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, p):
        if self.elements + p.numel() > BUCKET_SIZE:
            self.flush()
        self.arrived.append(p)
        self.elements += p.numel()

    def flush(self):
        flat = torch.cat([p.grad.flatten() for p in self.arrived])
        dist.all_reduce(flat, group=self.group)
        flat /= self.group.size()
        for p, grad in zip(self.arrived, flat.split([p.numel() for p in self.arrived])):
            p.grad.copy_(grad.view_as(p))
        self.arrived, self.elements = [], 0


def loss(model, batch):
    return cross_entropy(model(batch["x"], batch["modality"]), batch["labels"])


def parallel(mesh):
    model = MultiModal()
    return model, ReduceBucket(model, mesh.get_group("dp"))


def step(built, batch):
    model, bucket = built
    value = loss(model, batch)
    value.backward()
    bucket.flush()
    return value.detach()


generator = torch.Generator().manual_seed(2343)
orders = [
    [0, 1, 2, 0, 1, 1, 2, 1, 0, 0],
    [1, 2, 0, 0, 1, 2, 0, 1, 1, 2],
    [2, 1, 0, 2, 1, 0, 1, 2, 2, 0],
]
batches = [
    {
        "x": torch.randn(10, INPUTS, generator=generator),
        "modality": torch.tensor(order),
        "labels": torch.randint(CLASSES, (10,), generator=generator),
    }
    for order in orders
]
arguments = MultiModal, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
