"""Pipeline and tensor parallelism with sequences of variable length: shapes are sent before tensors.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/620 "[BUG] communicate shapes when variable_seq_lengths
enabled" (tp > 1: "tensor_shape was not correctly communicated among ranks", a hang), 2023-12-07.
Wrong: the shape goes to the rank with the next number, and is expected from the one before. With tp 2, rank 0's
neighbour in the pipeline is rank 2, not rank 1.
A right diagnosis says: the ranks hang in the first step: rank 0 waits in the send of the shape to rank 1
(send_shape in send_forward), which receives nothing, and rank 3 waits to receive it from rank 2: the peers
are not the neighbours along pp (0 and 2, 1 and 3).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, HIDDEN, VOCAB = 16, 32, 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = (
            nn.RMSNorm(DIM),
            nn.Linear(DIM, HIDDEN),
            nn.Linear(HIDDEN, DIM),
        )

    def forward(self, x):
        return x + self.fc2(silu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def send_shape(shape):
    dist.send(torch.tensor(shape), dist.get_rank() + 1)


def receive_shape():
    shape = torch.empty(3, dtype=torch.int64)
    dist.recv(shape, dist.get_rank() - 1)
    return shape.tolist()


def send_forward(output, peer):
    send_shape(output.shape)
    dist.send(output.detach(), peer)


def receive_forward(peer):
    hidden = torch.empty(receive_shape())
    dist.recv(hidden, peer)
    return hidden.requires_grad_()


def setup(mesh):
    model, last = Model(), mesh.get_local_rank("pp") == 1
    del model.layers["0" if last else "1"]
    if last:
        model.embedding = None
    else:
        model.head = None
    plan = {"layers.*.fc1": ColwiseParallel(), "layers.*.fc2": RowwiseParallel()}
    peer = dist.get_global_rank(mesh.get_group("pp"), 0 if last else 1)
    return parallelize_module(model, mesh["tp"], plan), peer


def train_step(built, batch):
    model, peer = built
    if model.head is None:
        output = model(batch["tokens"])
        send_forward(output, peer)
        grad = torch.empty_like(output)
        dist.recv(grad, peer)
        output.backward(grad)
        return None
    hidden = receive_forward(peer)
    value = cross_entropy(model(hidden).flatten(0, 1), batch["labels"].flatten())
    value.backward()
    dist.send(hidden.grad, peer)
    return value


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(620)
batches = [
    {name: torch.randint(VOCAB, (2, n), generator=generator) for name in ("tokens", "labels")}
    for n in (6, 4, 7)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 2, "tp": 2}, step=train_step)
    print(titanlite.compare(Model, setup, timeout_seconds=40, **options))
