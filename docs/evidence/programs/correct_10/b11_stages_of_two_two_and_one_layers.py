"""Five layers on three pipeline stages: the last one, which has the head, gets one layer only.

Thread: of the kind NVIDIA/Megatron-LM issue #1303 "[QUESTION] How to split the Transform layer when the pipeline is uneven?"
(2024), issue #381 "How to split the num_layers unevenly when using pipeline parallelism?" (2023), and vllm-project/vllm pull
request #13839 "Improve pipeline partitioning" (2025).
Correct: every layer is in one stage, under its number in the whole model, on which the scale of its output depends.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, SPLIT = 12, 8, (2, 2, 1)
ALL = range(sum(SPLIT))


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.scale = (2 * (number + 1)) ** -0.5
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.scale * self.down(silu(self.up(past + self.mix(x))))


class Model(nn.Module):
    """The whole model, or the part of it with the given layers."""

    def __init__(self, layers=ALL):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM) if layers[0] == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in layers})
        ends = layers[-1] == ALL[-1]
        self.head = nn.Linear(DIM, VOCAB) if ends else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    whole = Model()
    first = sum(SPLIT[:index])
    module = Model(range(first, first + SPLIT[index]))
    weights = whole.state_dict()
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    stage = PipelineStage(module, index, 3, torch.device("cpu"), group=mesh.get_group("pp"))
    return module, Schedule1F1B(stage, n_microbatches=6, loss_fn=criterion)


def step(built, batch):
    schedule, losses = built[1], []
    if dist.get_rank() == 0:
        schedule.step(batch["tokens"])
    elif dist.get_rank() == 2:
        schedule.step(target=batch["labels"], losses=losses)
    else:
        schedule.step()
    return torch.stack(losses).mean() if losses else None


rng = torch.Generator().manual_seed(324)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (6, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
