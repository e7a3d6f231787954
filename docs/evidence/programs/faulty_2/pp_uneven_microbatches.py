"""A GPipe schedule by hand whose microbatches have 3, 3 and 2 rows.

Thread: https://github.com/pytorch/pytorch/issues/126600 "[Pipelining] Support for uneven microbatch
sizes", 2024-05-18 (batch size 8 in 3 microbatches).
Wrong: each microbatch's mean loss is divided by the number of microbatches, though the last one has
fewer rows.
A right diagnosis says: all stages' gradients are sums over the microbatches with wrong coefficients: the
mean of the microbatches' means is taken, so the last microbatch counts 1/3 rather than 2/8.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

FEATURES, DIM, CLASSES, N_MICROBATCHES = 6, 16, 5, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        if self.stem is not None:
            x = self.stem(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.classifier is None else self.classifier(x)


def split_net(mesh):
    stage, net = mesh.get_local_rank("pp"), Net()
    for i in (2, 3) if stage == 0 else (0, 1):
        del net.layers[str(i)]
    if stage == 0:
        net.classifier = None
    else:
        net.stem = None
    return net


def gpipe(net, batch):
    first = net.stem is not None
    xs = batch["x"].tensor_split(N_MICROBATCHES)
    ys = batch["y"].tensor_split(N_MICROBATCHES)
    inputs, outputs = [], []
    for x, y in zip(xs, ys):
        if not first:
            x = torch.empty(len(y), DIM)
            dist.recv(x, 0)
            x.requires_grad_()
        out = net(x)
        if first:
            dist.send(out.detach(), 1)
        else:
            out = cross_entropy(out, y) / N_MICROBATCHES
        inputs.append(x)
        outputs.append(out)
    for x, out in zip(inputs, outputs):
        if first:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            out.backward()
            dist.send(x.grad, 0)
    return None if first else torch.stack([out.detach() for out in outputs]).sum()


def plain_loss(net, batch):
    return cross_entropy(net(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(26)
batches = [
    {
        "x": torch.randn(8, FEATURES, generator=generator),
        "y": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=gpipe)
    print(titanlite.compare(Net, split_net, **options))
