"""LAMB on FSDP2's shards with norms of whole parameters.

Thread: https://github.com/hpcaitech/ColossalAI/pull/5476 "[feat] Add distributed lamb; minor fixes in
DeviceMesh", 2024-03-26.
Right: moments are elementwise, so each rank has those of its shard. The squared norms of weight and
update are summed over the ranks before the trust ratio. One parameter has fewer rows than two ranks
divide evenly.
Must not be accused: optimizer arithmetic on local tensors.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import titanlite


def to_local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DistributedLamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)

    def update(self, p, group):
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        weight, grad = to_local(p), to_local(p.grad)
        m, v = to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * weight
        squares = torch.stack([weight.square().sum(), update.square().sum()])
        if isinstance(p, DTensor):
            dist.all_reduce(squares, group=p.device_mesh.get_group())
        weight_norm, update_norm = squares.sqrt()
        ratio = (
            weight_norm.clamp(0, 10) / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        )
        weight.add_(update * ratio, alpha=-group["lr"])


class Bert(nn.Module):
    def __init__(self, vocab=19, dim=12):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.layer = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 30), nn.GELU(), nn.Linear(30, dim))
            for _ in range(2)
        )
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for layer in self.layer:
            x = x + layer(x)
        return self.decoder(x)


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def boost(mesh):
    model = Bert()
    for layer in model.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(5476)
batches = [
    {name: torch.randint(19, (4, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Bert, boost, optimizer=DistributedLamb, **options))
