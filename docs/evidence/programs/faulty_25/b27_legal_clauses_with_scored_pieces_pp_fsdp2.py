"""A clause classifier in two pipeline stages under FSDP2; each piece of a batch is scored before it is trained on.

Thread: NVIDIA-NeMo/Automodel pull request #3530 "fix(pp): keep accumulated grads across stage re-initialization"
(2026): when torch.distributed.pipelining initializes its stages again, its clean-up sets the gradients of FSDP modules
to None, so that "only the last micro-batch was actually training the model".
Fault: in Trainer.train_batch, map is lazy: schedule.eval() for a piece runs between the schedule.step() of two pieces;
the switch from evaluation back to training initializes the stages anew, and this drops the gradients gathered so far.
REPAIR: `zip(pieces, map(self.score, pieces))` -> `zip(pieces, list(map(self.score, pieces)))`
A right first sentence says: the gradients of all parameters of both stages are those of the last of the two pieces
only; the accumulated gradient of the first is lost, as schedule.eval between the steps makes the stages initialize
again.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import titanlite

WORDS, LENGTH, WIDTH, HEADS, KINDS, ROWS = 30, 8, 16, 4, 5, 16
PIECES, MICROBATCHES, GAMMA = 2, 2, 2.0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ClauseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x).mean(1)) if self.head is not None else x

    def keep_stage(self, index):
        """Leaves what the stage needs."""
        for name in list(self.layers):
            if int(name) // 2 != index:
                del self.layers[name]
        if index == 0:
            self.norm, self.head = None, None
        else:
            self.embed = None
        return self


def weighted_loss(logits, target):
    kinds, weights = target[:, 0].long(), target[:, 1]
    return (weights * F.cross_entropy(logits, kinds, reduction="none")).mean()


def hardness(logits, kinds):
    """Weights of the focal loss, as constants."""
    right = logits.detach().softmax(-1).gather(1, kinds.unsqueeze(1)).squeeze(1)
    return (1 - right) ** GAMMA


class Trainer:
    """Hard clauses count more; how hard they are is measured with the weights as they are."""

    def __init__(self, module, schedule, group):
        self.module, self.schedule = module, schedule
        self.first, self.last = dist.get_rank(group) == 0, dist.get_rank(group) == 1

    def score(self, piece):
        tokens, kinds = piece
        target = torch.stack([kinds, torch.ones_like(kinds)], 1).to(torch.get_default_dtype())
        logits = self.schedule.eval(*([tokens] if self.first else []), target=target)
        if self.last:
            target[:, 1] = hardness(logits, kinds)
        return target

    def train_batch(self, tokens, kinds):
        values = []
        pieces = list(zip(tokens.chunk(PIECES), kinds.chunk(PIECES)))
        for (piece, _), target in zip(pieces, map(self.score, pieces)):
            inputs, losses = [piece] if self.first else [], []
            self.schedule.step(*inputs, target=target, losses=losses)
            values.extend(losses)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(PIECES * MICROBATCHES)
        return torch.stack(values).mean().detach() if self.last else None


def plain():
    return ClauseModel()


def parallel(mesh):
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    module = ClauseModel().keep_stage(index)
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=weighted_loss, scale_grads=False)
    return module, Trainer(module, schedule, group)


def loss(model, batch):
    logits, kinds = model(batch["tokens"]), batch["kind"]
    return (hardness(logits, kinds) * F.cross_entropy(logits, kinds, reduction="none")).mean()


def step(built, batch):
    return built[1].train_batch(batch["tokens"], batch["kind"])


generator = torch.Generator().manual_seed(3530)


def clauses():
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"tokens": tokens, "kind": tokens[:, 0] * KINDS // WORDS}


batches = [clauses() for _ in range(3)]
arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"pp": 2, "dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
