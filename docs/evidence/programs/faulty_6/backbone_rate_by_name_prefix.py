"""DETR-like fine-tuning under DDP: the backbone's learning rate is given to names that start with "backbone.".

Thread: https://github.com/huggingface/lerobot/pull/280 "Bug fix: fix setting different learning rates between
backbone and main model in ACT policy" ("we were not identifying the backbone in the filtering of the parameters"),
2024-06-17.
Wrong: the optimizer is made of the wrapped model, whose names start with "module.". No name matches, so the backbone
is trained with the tenfold rate of the other layers.
EXPECT: step 1's loss and gradients agree, and the weights of the backbone (backbone.*) differ after step 1, by a
factor of ten in their updates; those of neck and head agree. The optimizer's groups are wrong: the backbone's
parameters have the learning rate of the rest, as their names begin with "module." under DDP.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, SIZE, CLASSES, LR, LR_BACKBONE = 6, 8, 3, 1e-2, 1e-3


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.neck, self.norm = nn.Linear(CHANNELS * SIZE * SIZE // 16, 16), nn.LayerNorm(16)
        self.class_head, self.box_head = nn.Linear(16, CLASSES), nn.Linear(16, 4)

    def forward(self, images):
        h = self.norm(self.neck(self.backbone(images).flatten(1)))
        return self.class_head(h), self.box_head(h).sigmoid()


def loss(model, batch):
    logits, boxes = model(batch["images"])
    return cross_entropy(logits, batch["classes"]) + 5 * l1_loss(boxes, batch["boxes"])


def get_param_groups(named_parameters):
    backbone, others = [], []
    for name, p in named_parameters:
        (backbone if name.startswith("backbone.") else others).append(p)
    return [{"params": others}, {"params": backbone, "lr": LR_BACKBONE}]


def build_optimizer(parameters):
    names = [name for name, _ in Detector().named_parameters()]
    return torch.optim.SGD(get_param_groups(zip(names, parameters)), lr=LR, momentum=0.9)


def parallel(mesh):
    model = DistributedDataParallel(Detector(), process_group=mesh.get_group("dp"))
    groups = get_param_groups(model.named_parameters())
    return model, torch.optim.SGD(groups, lr=LR, momentum=0.9)


def train_one_batch(built, batch):
    model, _ = built
    value = loss(model, batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(280)
batches = [
    {
        "images": torch.randn(8, 3, SIZE, SIZE, generator=generator),
        "classes": torch.randint(CLASSES, (8,), generator=generator),
        "boxes": torch.rand(8, 4, generator=generator),
    }
    for _ in range(3)
]
arguments = Detector, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train_one_batch)
options["optimizer"] = build_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
