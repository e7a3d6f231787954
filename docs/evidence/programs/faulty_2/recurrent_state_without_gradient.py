"""Gated linear attention over sequence shards: rank 0 sends its recurrent state by P2P.

Thread: https://github.com/fla-org/flash-linear-attention/issues/494 "[Bug] [GDN] [GSA] An Obvious
difference between inference as a whole and chunk-wise inference.", comment of 2025-11-06 (rank 0 "sends
its recurrent_state to rank1 (on GPU1) via a P2P (point-to-point) operation").
Wrong: dist.send and dist.recv are no autograd functions, so nothing of rank 1's loss reaches the tokens
of rank 0 through the state. The forward pass is right.
A right diagnosis says: loss and forward pass agree; the gradients of gla's projections (k, v, gate) and
of what is before gla lack the part that rank 1's loss gives through the state: the backward pass is wrong
inside gla on rank 0 of sp. The gradients behind gla (o, head) agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

import titanlite

DIM, HEADS, VOCAB = 16, 2, 20


class GatedLinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.gate, self.o = nn.Linear(DIM, HEADS), nn.Linear(DIM, DIM, bias=False)
        self.group = None

    def initial_state(self, batch):
        state = torch.zeros(batch, HEADS, DIM // HEADS, DIM // HEADS)
        if self.group is not None and dist.get_rank(self.group) > 0:
            dist.recv(state, dist.get_global_rank(self.group, dist.get_rank(self.group) - 1))
        return state

    def pass_on(self, state):
        if (
            self.group is not None
            and dist.get_rank(self.group) < dist.get_world_size(self.group) - 1
        ):
            to = dist.get_global_rank(self.group, dist.get_rank(self.group) + 1)
            dist.send(state.detach().contiguous(), to)

    def forward(self, x):  # [b, s, d]
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (self.q, self.k, self.v))
        decay = logsigmoid(self.gate(x)).exp()
        state, outputs = self.initial_state(len(x)), []
        for t in range(x.shape[1]):
            new = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            state = decay[:, t, :, None, None] * state + new
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        self.pass_on(state)
        return self.o(torch.stack(outputs, 1).flatten(2))


class GLAModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.attn_norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.gla, self.norm = GatedLinearAttention(), nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embeddings(ids)
        return self.lm_head(self.norm(x + self.gla(self.attn_norm(x))))


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def build(mesh):
    model = GLAModel()
    model.gla.group = mesh.get_group("sp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(40)
batches = [
    {name: torch.randint(VOCAB, (3, 8), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split={"sp": 1})
    print(titanlite.compare(GLAModel, build, **options))
