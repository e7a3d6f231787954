"""Pipeline x tensor parallelism: each rank sends a part of the activations, the next stage gathers them.

Thread: https://github.com/hpcaitech/ColossalAI/pull/123 "add scatter/gather optim for pipeline", 2022-01-06.
Right: a stage's output is the same on all ranks of tp, so each sends its chunk to its neighbour, and the ranks
of the next stage gather the chunks over tp. The gradient goes back in the same way.
Must not be accused: chunks that are sent instead of tensors, gathers outside of the modules.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, HIDDEN, VOCAB, SEQ, NUM_MICROBATCHES = 16, 32, 20, 5, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense_1 = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN)
        self.dense_2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.dense_2(gelu(self.dense_1(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Stage:
    def __init__(self, mesh):
        self.last, self.tp_group = mesh.get_local_rank("pp") == 1, mesh.get_group("tp")
        self.peer = dist.get_global_rank(mesh.get_group("pp"), 0 if self.last else 1)
        model = Gpt()
        for i in ("0", "1") if self.last else ("2", "3"):
            del model.blocks[i]
        if self.last:
            model.embed = None
        else:
            model.head = None
        plan = {"blocks.*.dense_1": ColwiseParallel(), "blocks.*.dense_2": RowwiseParallel()}
        self.model = parallelize_module(model, mesh["tp"], plan)

    def send(self, tensor):
        """only the rank's 1 / tp of the flattened tensor"""
        chunks = tensor.detach().flatten().chunk(self.tp_group.size())
        dist.send(chunks[self.tp_group.rank()].contiguous(), self.peer)

    def receive(self, shape):
        chunk = torch.empty(torch.Size(shape).numel() // self.tp_group.size())
        dist.recv(chunk, self.peer)
        chunks = [torch.empty_like(chunk) for _ in range(self.tp_group.size())]
        dist.all_gather(chunks, chunk, group=self.tp_group)
        return torch.cat(chunks).view(shape)


def token_loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return token_loss(model(batch["ids"]), batch["labels"])


def build(mesh):
    stage = Stage(mesh)
    return stage.model, stage


def train_batch(built, batch):
    model, stage = built
    total = 0
    for ids, labels in zip(*(batch[n].chunk(NUM_MICROBATCHES) for n in ("ids", "labels"))):
        shape = (*ids.shape, DIM)
        if stage.last:
            hidden = stage.receive(shape).requires_grad_()
            value = token_loss(model(hidden), labels) / NUM_MICROBATCHES
            value.backward()
            stage.send(hidden.grad)
            total += value.detach()
        else:
            output = model(ids)
            stage.send(output)
            output.backward(stage.receive(shape))
    return total if stage.last else None


generator = torch.Generator().manual_seed(123)
batches = [
    {name: torch.randint(VOCAB, (4, SEQ), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2, "tp": 2}, step=train_batch)
    print(titanlite.compare(Gpt, build, **options))
