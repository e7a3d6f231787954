"""Pollen classification with a snapshot of the own trunk as teacher; the student is under FSDP2, the teacher whole.

Thread: pytorch/pytorch pull request #112837 "Implement cpu_offload and full_state_dict for get_state_dict" (2023) and
#124741 "Added test to show rank 0 CPU full state dict flow" (2024): with full_state_dict and cpu_offload, all ranks
but the first get an empty dict.
Fault: SnapshotStudent.take_snapshot asks get_model_state_dict for a full state dict with cpu_offload=True. On rank 1
it is empty, and load_state_dict(strict=False), which is to ignore the student's head, accepts that: this rank's
teacher keeps the starting weights.
REPAIR: `full_state_dict=True, cpu_offload=True` -> `full_state_dict=True`
A right first sentence says: on rank 1 the teacher is never refreshed and keeps its starting weights, as the state
dict of take_snapshot is empty there (full_state_dict with cpu_offload gives it to rank 0 only).
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import titanlite

GRAIN, WIDTH, SPECIES, ROWS, EVERY = 9, 14, 5, 8, 2


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(GRAIN, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Student(Trunk):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, SPECIES)

    def forward(self, x):
        features = super().forward(x)
        return features, self.head(F.silu(features))


class SnapshotStudent(nn.Module):
    """The teacher is a copy of the student's trunk that is renewed at every EVERY-th call."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Student(), Trunk()
        self.teacher.load_state_dict(self.student.state_dict(), strict=False)
        self.teacher.requires_grad_(False)
        self.calls = 0

    def student_weights(self):
        return copy.deepcopy(self.student.state_dict())

    def take_snapshot(self):
        self.teacher.load_state_dict(self.student_weights(), strict=False)

    def forward(self, grains, seen_by_teacher):
        if self.calls and self.calls % EVERY == 0:
            self.take_snapshot()
        self.calls += 1
        with torch.no_grad():
            target = self.teacher(seen_by_teacher)
        features, logits = self.student(grains)
        return features, logits, target


class ShardedSnapshotStudent(SnapshotStudent):
    def shard(self, mesh):
        for layer in self.student.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.student, mesh=mesh)
        return self

    def student_weights(self):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.student, options=options)


def plain():
    return SnapshotStudent()


def parallel(mesh):
    return ShardedSnapshotStudent().shard(mesh["dp"])


def loss(model, batch):
    features, logits, target = model(batch["weak"], batch["strong"])
    return F.cross_entropy(logits, batch["species"]) + 0.5 * F.mse_loss(features, target)


generator = torch.Generator().manual_seed(112837)
prototypes = torch.randn(SPECIES, GRAIN, generator=generator, dtype=torch.float64)


def grains():
    species = torch.randint(SPECIES, (ROWS,), generator=generator)
    noise = torch.randn(2, ROWS, GRAIN, generator=generator, dtype=torch.float64)
    weak, strong = prototypes[species] + 0.3 * noise[0], prototypes[species] + 0.6 * noise[1]
    return {"weak": weak, "strong": strong, "species": species}


batches = [grains() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
