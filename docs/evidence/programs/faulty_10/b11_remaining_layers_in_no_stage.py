"""torch.distributed.pipelining with five layers on two stages.

Thread: pytorch/torchtitan pull request #963 "[DeepSeek] Fix pipeline stage sharding." (2025): "Our current pipeline stage
sharding was ignoring some layers giving us incorrect results when using PP." Also NVIDIA/Megatron-LM issue #1304 "[BUG] The
problem of splitting transformer layers when pipeline parallelism cannot be evenly divided." (2024).
Fault: in Stage, each stage takes num_layers // num_stages layers, so the remainder is in no stage.
REPAIR: `first + per_stage` -> `(first + per_stage if index < num_stages - 1 else num_layers)`
Expected: layers.4 is in no stage: no rank has its parameters, and it never runs; the output of layers.3 on rank 1 agrees
in step 1, and final_norm receives it instead of the output of layers.4. Give the remaining layer to a stage.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, silu

import titanlite

CONFIG = {"vocab": 12, "hidden": 8, "num_layers": 5}


class DecoderLayer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(hidden, eps=1e-6), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.down = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.norm(x)
        y = self.mix(y.cumsum(1) / torch.arange(1, y.shape[1] + 1)[:, None])
        return x + self.down(silu(self.gate(y)) * y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        vocab, hidden, num_layers = CONFIG.values()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(hidden) for i in range(num_layers)})
        self.final_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x):
        x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.final_norm(x))


class Stage(nn.Module):
    def __init__(self, model, index, num_stages):
        super().__init__()
        num_layers = len(model.layers)
        per_stage = num_layers // num_stages
        first = per_stage * index
        last = first + per_stage
        self.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in range(first, last)})
        self.embed_tokens = model.embed_tokens if index == 0 else None
        self.final_norm = model.final_norm if index == num_stages - 1 else None
        self.lm_head = model.lm_head if index == num_stages - 1 else None

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.final_norm(x))


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["tokens"]), batch["labels"])


def parallel(mesh):
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    module = Stage(Model(), index, mesh["pp"].size())
    stage = PipelineStage(module, index, mesh["pp"].size(), torch.device("cpu"), group=group)
    return module, Schedule1F1B(stage, n_microbatches=4, loss_fn=criterion)


def step(built, batch):
    _, schedule = built
    if dist.get_rank() == 0:
        schedule.step(batch["tokens"])
        return None
    losses = []
    schedule.step(target=batch["labels"], losses=losses)
    return torch.stack(losses).mean()


rng = torch.Generator().manual_seed(308)
batches = []
for _ in range(3):
    tokens = torch.randint(CONFIG["vocab"], (8, 6), generator=rng)
    batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
