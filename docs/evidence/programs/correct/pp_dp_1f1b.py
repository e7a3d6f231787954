"""1F1B by hand over DDP, which synchronizes in the backward of the last microbatch.

Thread: https://github.com/huggingface/picotron/pull/5 "Add gradient accumulation to PP + fix DP
integration with PP (1f1b)", 2024-11-01 (its last scenario).
Right: the backward of the last microbatch runs in the cooldown on stage 0 and in the steady state on
stage 1; each stage turns synchronization on for it.
Must not be accused: gradients that a stage does not average, losses divided by the microbatches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

VOCAB, DIM, SEQ, MICROBATCHES = 20, 16, 5, 4


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
                for i in range(2)
            }
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(index): whole.layers[str(index)]})
        self.head = whole.head if index == 1 else nn.Identity()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x)


def plain_loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def build(mesh):
    model = DDP(Stage(Transformer(), mesh.get_local_rank("pp")), process_group=mesh.get_group("dp"))
    return model, mesh


def train_step_1f1b(built, batch):
    model, mesh = built
    stage, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    peer = dist.get_global_rank(group, 1 - stage)
    xs, ys = batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES)
    shape = (len(xs[0]), SEQ, DIM)
    inputs, outputs, losses, sent = [], [], [], []

    def forward(i):
        x = xs[i]
        if stage == 1:
            x = torch.empty(shape)
            dist.recv(x, peer)
            x.requires_grad_()
        y = model(x)
        if stage == 0:
            sent.append((y, dist.isend(y.detach(), peer)))
        else:
            y = cross_entropy(y.flatten(0, 1), ys[i].flatten()) / MICROBATCHES
            losses.append(y.detach())
        inputs.append(x)
        outputs.append(y)

    def backward():
        x, y = inputs.pop(0), outputs.pop(0)
        grad = None
        if stage == 0:
            grad = torch.empty(shape)
            dist.recv(grad, peer)
        torch.autograd.backward(y, grad)
        if stage == 1:
            sent.append((x, dist.isend(x.grad, peer)))

    num_warmup = 1 - stage
    model.require_backward_grad_sync = False
    for i in range(MICROBATCHES + num_warmup):  # warmup, steady state, cooldown
        if i < MICROBATCHES:
            forward(i)
        if i >= num_warmup:
            if i == MICROBATCHES + num_warmup - 1:
                model.require_backward_grad_sync = True
                model.reducer.prepare_for_backward([])
            backward()
    for _, work in sent:
        work.wait()
    return torch.stack(losses).sum() if losses else None


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randint(VOCAB, (8, SEQ), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Transformer,
            build,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2, "pp": 2},
            split="dp",
            step=train_step_1f1b,
        )
    )
