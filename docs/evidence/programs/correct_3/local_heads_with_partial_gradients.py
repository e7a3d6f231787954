"""A DTensor layer that leaves DTensor for its own arithmetic and names the placement of the gradient.

Thread: https://github.com/pytorch/pytorch/pull/110629 "[dtensor] add grad placements kwarg to to_local API",
2023-10-05.
Right: every rank mixes the replicated input with its own heads, so the gradient of the local input is Partial;
the local result is a partial sum too, and is declared as such before it is reduced. The heads' temperature
is sharded, the mixing strength is replicated and used on every rank, with a Partial gradient as well.
Must not be accused: plain tensors in the middle of DTensors, a scalar parameter with a partial gradient.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

import titanlite

DIM, HEADS, HEAD_DIM = 12, 4, 6


class HeadMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Parameter(torch.randn(HEADS, HEAD_DIM, DIM) * 0.3)
        self.back = nn.Parameter(torch.randn(HEADS, DIM, HEAD_DIM) * 0.3)
        self.temperature = nn.Parameter(torch.ones(HEADS))
        self.strength = nn.Parameter(torch.ones(1))

    @staticmethod
    def mix(x, project, back, temperature, strength):
        heads = torch.einsum("bsd,hed->bhse", x, project)
        weights = (heads @ heads.mT * temperature[:, None, None]).softmax(-1)
        return strength * torch.einsum("bhse,hde->bsd", weights @ heads, back)

    def forward(self, x):
        if not isinstance(self.project, DTensor):
            return self.mix(x, self.project, self.back, self.temperature, self.strength)
        mesh, partial = self.project.device_mesh, [Partial()]
        x = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=partial)
        strength = self.strength.to_local(grad_placements=partial)
        sharded = (p.to_local() for p in (self.project, self.back, self.temperature))
        out = DTensor.from_local(self.mix(x, *sharded, strength), mesh, partial)
        return out.redistribute(placements=[Replicate()]).to_local()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.mixers = nn.ModuleList(HeadMixer() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.outputs(x)


def parallel(mesh):
    network = Network()
    for mixer in network.mixers:
        for name, p in list(mixer.named_parameters()):
            placement = Replicate() if name == "strength" else Shard(0)
            setattr(mixer, name, nn.Parameter(distribute_tensor(p.data, mesh["tp"], [placement])))
    return network


def loss(network, batch):
    return mse_loss(network(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(110629)
batches = [
    {name: torch.randn(3, 7, 5, generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Network, parallel, batches=batches, loss=loss, ranks={"tp": 2}))
