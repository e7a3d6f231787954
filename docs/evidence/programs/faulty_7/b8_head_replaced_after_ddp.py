"""Fine-tuning with DDP: the classifier is replaced after the model is wrapped.

Thread: https://github.com/pytorch/pytorch/issues/12603 "DistributedDataParallel does not get the same grad at all"
(teng-li: "If you change the parameter yourself to a new one after wrapping up your model to DDP ... the new parameter's
hook won't get called"), 2018-11; often on the PyTorch forums with a new fc layer.
Wrong: DDP has hooks on the parameters that existed when it was built. The new head has none, so each rank trains it
with the gradient of its own rows. find_unused_parameters hides that the old head has none.
PLACE: head.weight and head.bias, backward pass (gradient reduction)
KIND: parameters added after DDP wrapped the model: their gradients are not reduced over dp
REPAIR: `return with_new_head(wrap(Pretrained(), mesh))` -> `return wrap(with_new_head(Pretrained()), mesh)`
EXPECT: the gradients of head.weight and head.bias are not averaged over dp: each rank has that of its own rows (on all
ranks), since head was put in after DDP wrapped the model. All other gradients of step 1 agree. Replace the head before
wrapping.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES = 5


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(12, 20)

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


def with_new_head(model):
    getattr(model, "module", model).head = nn.Linear(12, CLASSES)
    return model


def wrap(model, mesh):
    return DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )


def plain():
    return with_new_head(Pretrained())


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def parallel(mesh):
    return with_new_head(wrap(Pretrained(), mesh))


generator = torch.Generator().manual_seed(20)
batches = [
    {
        "image": torch.randn(8, 3, 6, 6, generator=generator),
        "label": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]
arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
