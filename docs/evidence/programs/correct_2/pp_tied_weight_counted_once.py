"""A pipeline with tied embeddings: both stages hold the matrix, whose norm is counted once.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/1252 "Cleaning up tensor/pipe parallel accounting.",
2021-07-26 ("Pipeline parallelism may replicate parameters. Avoid multi-counting.").
Right: the gradients of the two copies are all-reduced over pp, so that both are the whole gradient; the
copy of the last stage is marked ds_pipe_replicated and left out of the norm.
Must not be accused: a parameter on two stages, its all-reduce, a norm to which stage 1 does not add
all of its gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, VOCAB, SEQ, MICROBATCHES, MAX_NORM = 16, 20, 6, 2, 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """the whole model, or one of two stages"""

    pipe_group = None

    def __init__(self, stage=None):
        super().__init__()
        self.stage = stage
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.norm = nn.LayerNorm(DIM)
        if stage is not None:
            for i in (2, 3) if stage == 0 else (0, 1):
                del self.blocks[str(i)]
            self.norm = self.norm if stage == 1 else None

    def forward(self, x):
        if self.stage != 1:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.stage == 0 else self.norm(x) @ self.embed.weight.t()


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(model, batch):
    return criterion(model(batch["x"]), batch["y"])


def build(mesh):
    model = GPT(mesh.get_local_rank("pp"))
    model.pipe_group = mesh.get_group("pp")
    model.embed.weight.ds_pipe_replicated = model.stage == 1
    return model


def train_batch(model, batch):
    total = None
    for x, y in zip(batch["x"].chunk(MICROBATCHES), batch["y"].chunk(MICROBATCHES)):
        if model.stage == 0:
            out = model(x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            hidden = torch.empty(len(y), SEQ, DIM)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            loss = criterion(model(hidden), y) / MICROBATCHES
            loss.backward()
            dist.send(hidden.grad, 0)
            total = loss.detach() + (0 if total is None else total)
    dist.all_reduce(model.embed.weight.grad, group=model.pipe_group)  # reduce tied gradients
    return total


def clip_grad_norm_(model):
    total_norm = torch.zeros(())
    for p in model.parameters():
        # Pipeline parallelism may replicate parameters. Avoid multi-counting.
        if not getattr(p, "ds_pipe_replicated", False):
            total_norm += p.grad.norm() ** 2
    if model.pipe_group is not None:
        dist.all_reduce(total_norm, group=model.pipe_group)
    total_norm = total_norm.sqrt()
    for p in model.parameters():
        p.grad.mul_(MAX_NORM / (total_norm + 1e-6))
    return total_norm


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


generator = torch.Generator().manual_seed(50)
batches = [
    {name: torch.randint(VOCAB, (4, SEQ), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=train_batch)
    options |= dict(clip=clip_grad_norm_, optimizer=momentum)
    print(titanlite.compare(GPT, build, **options))
