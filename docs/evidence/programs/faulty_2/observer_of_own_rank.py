"""Quantization-aware training whose observers see their own rank's activations.

Thread: https://github.com/pytorch/pytorch/issues/85627 "Will the observer(for activation) be
synchronized across GPUs in DDP?", 2022-09-26.
Wrong: min_val and max_val are those of the rank's rows. DDP's broadcast of buffers keeps rank 0's.
A right diagnosis says: the output of the first fake-quantizer differs on every rank though its input
agrees: its range (min_val, max_val) is taken over the rank's own part of the batch, not over dp.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

LEVELS, MOMENTUM = 255, 0.1


class FakeQuantize(nn.Module):
    """Moving average of the range; straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.register_buffer("min_val", torch.tensor(-1.0))
        self.register_buffer("max_val", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.min_val.lerp_(x.amin(), MOMENTUM)
                self.max_val.lerp_(x.amax(), MOMENTUM)
        scale = (self.max_val - self.min_val) / LEVELS
        low = self.min_val.clone()
        q = torch.round((x - low) / scale).clamp(0, LEVELS) * scale + low
        return x + (q - x).detach()


class QatMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant = FakeQuantize()
        self.fc1 = nn.Linear(12, 32)
        self.act_fake_quant = FakeQuantize()
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x):
        x = self.quant(x)
        x = self.act_fake_quant(torch.relu(self.fc1(x)))
        return self.fc2(x)


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["target"])


def build():
    return DistributedDataParallel(QatMlp())


generator = torch.Generator().manual_seed(85)
batches = [
    {
        "image": torch.randn(8, 12, generator=generator),
        "target": torch.randint(5, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(QatMlp, build, batches=batches, loss=loss, ranks={"dp": 2}, split="dp"))
