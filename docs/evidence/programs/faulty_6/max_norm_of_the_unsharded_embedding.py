"""A two-tower recommender under FSDP2 whose embeddings have max_norm: the lookup renormalizes rows in place.

Thread: https://github.com/pytorch/pytorch/pull/67799 "[PyTorch][3/N] Enable the rest forward spec options for
ShardedEmbedding and ShardedEmbeddingBag." (max_norm of sharded embeddings), 2021-11-03.
Wrong: the forward pass writes into the gathered weight, and FSDP frees it. The shards keep the long rows, and the
optimizer steps from these, while one process steps from the renormalized ones.
EXPECT: step 1's loss and gradients agree, and the weights users.weight and items.weight differ after step 1 (in the
rows that were looked up; they are longer than max_norm); the towers' agree. The embedding's in-place renormalization
(max_norm) is done on the unsharded parameter and lost when FSDP2 frees it.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits

import titanlite

USERS, ITEMS, DIM = 14, 18, 8


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(DIM, 20), nn.LayerNorm(20), nn.Linear(20, 6)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, max_norm=1.0)
        self.items = nn.Embedding(ITEMS, DIM, max_norm=1.0)
        self.user_tower, self.item_tower = Tower(), Tower()

    def forward(self, users, items):
        u, v = self.user_tower(self.users(users)), self.item_tower(self.items(items))
        return (u * v).sum(-1)


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["users"], batch["items"]), batch["clicked"])


def parallel(mesh):
    model = TwoTower()
    for module in (model.users, model.items, model.user_tower, model.item_tower):
        fully_shard(module, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def create_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


generator = torch.Generator().manual_seed(67799)


def clicks():
    return {
        "users": torch.randint(USERS, (10,), generator=generator),
        "items": torch.randint(ITEMS, (10,), generator=generator),
        "clicked": torch.randint(2, (10,), generator=generator).double(),
    }


batches = [clicks() for _ in range(3)]
arguments = TwoTower, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
options["optimizer"] = create_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
