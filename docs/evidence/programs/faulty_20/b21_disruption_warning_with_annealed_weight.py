"""Early warning of plasma disruptions with causal convolutions under DDP; the weight of alarms is halved on a plateau.

Thread: rmchurch/disruptcnn issue #3 "ReduceLROnPlateau not reducing in certain scenarios" (2020): in a distributed run the
scheduler sees the validation loss of its own process; the average over all processes exists in the log only.
Fault: Plateau.observe compares the held-out loss of the rank's own shots with the best one so far, and doesn't average it over
the ranks; one rank halves the weight of the alarms where another keeps it.
REPAIR: `value = held_out.detach()` -> `value = self.average(held_out.detach())`
A right first sentence says: the plateau schedule is driven by each rank's own held-out loss, which isn't averaged over the
ranks, so its best value and the weight of the positive class (plateau.best, plateau.weight) drift apart between the ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, WIDTH, KERNEL, LEVELS, LENGTH, SHOTS = 5, 10, 3, 3, 20, 8


class Plateau(nn.Module):
    """Multiplies its weight by a factor whenever the held-out loss doesn't fall any more."""

    def __init__(self, start, factor=0.5, threshold=1e-3, group=None):
        super().__init__()
        self.factor, self.threshold, self.group = factor, threshold, group
        self.register_buffer("weight", torch.tensor(float(start)))
        self.register_buffer("best", torch.tensor(torch.inf))

    def average(self, x):
        if self.group is None:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x / dist.get_world_size(self.group)

    def observe(self, held_out):
        value = held_out.detach()
        if value < self.best * (1 - self.threshold):
            self.best.copy_(value)
        else:
            self.weight.mul_(self.factor)


class CausalBlock(nn.Module):
    def __init__(self, inputs, outputs, dilation):
        super().__init__()
        self.padding = (KERNEL - 1) * dilation
        self.conv1 = nn.Conv1d(inputs, outputs, KERNEL, dilation=dilation)
        self.conv2 = nn.Conv1d(outputs, outputs, KERNEL, dilation=dilation)
        self.skip = nn.Conv1d(inputs, outputs, 1)

    def forward(self, x):
        y = F.relu(self.conv1(F.pad(x, (self.padding, 0))))
        y = F.relu(self.conv2(F.pad(y, (self.padding, 0))))
        return F.relu(y + self.skip(x))


class WarningNetwork(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        widths = [CHANNELS] + [WIDTH] * LEVELS
        self.blocks = nn.Sequential(
            *(CausalBlock(widths[i], widths[i + 1], 2**i) for i in range(LEVELS))
        )
        self.alarm = nn.Conv1d(WIDTH, 1, 1)
        self.plateau = Plateau(4.0, group=group)

    def forward(self, signals):
        return self.alarm(self.blocks(signals)).squeeze(1)


class Trainer:
    """The network inside, and the wrapper through which the training pass goes."""

    def __init__(self, wrapped, network):
        self.wrapped, self.network = wrapped, network

    @torch.no_grad()
    def validate(self, signals, disrupts):
        return F.binary_cross_entropy_with_logits(self.network(signals), disrupts)

    def compute_loss(self, batch):
        self.network.plateau.observe(self.validate(batch["held_out"], batch["held_out_labels"]))
        logits = self.wrapped(batch["signals"])
        weight = self.network.plateau.weight
        return F.binary_cross_entropy_with_logits(logits, batch["labels"], pos_weight=weight)


def plain():
    return WarningNetwork()


def parallel(mesh):
    network = WarningNetwork(mesh.get_group("dp"))
    return DistributedDataParallel(network, broadcast_buffers=False)


def loss(model, batch):
    return Trainer(model, model).compute_loss(batch)


def step(model, batch):
    value = Trainer(model, model.module).compute_loss(batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(3)


def shots():
    """Signals grow before a disruption; the label is one from its precursor on."""
    signals = torch.randn(SHOTS, CHANNELS, LENGTH, generator=generator, dtype=torch.float64)
    onset = torch.randint(LENGTH // 2, 2 * LENGTH, (SHOTS, 1), generator=generator)
    labels = (torch.arange(LENGTH) >= onset).double()
    return signals * (1 + labels.unsqueeze(1)), labels


def campaign():
    (signals, labels), (held_out, held_out_labels) = shots(), shots()
    return dict(signals=signals, labels=labels, held_out=held_out, held_out_labels=held_out_labels)


batches = [campaign() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
