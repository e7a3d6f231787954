"""Multi-token prediction under context parallelism: tokens and labels are rolled across the ranks' chunks.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1795 "[QUESTION] In-depth explanation and verification
of roll_tensor logic for Context Parallelism in MTP", 2025-09-07.
Right: rank i holds chunks i and 2n - 1 - i. The last element of each chunk comes from the first of the
chunk that follows it in the sequence, on the next or previous rank or on the same one. The last label of
all is masked, and the sum is divided by the labels of all ranks.
Must not be accused: a last rank with fewer labels, the two chunks' order, P2P in both directions.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB, SEQ, FACTOR = 16, 20, 8, 0.3


def roll_tensor(t, group):
    """[b, s] shifted to the left by one; 0 at the end"""
    if group is None:
        return torch.cat([t[:, 1:], torch.zeros_like(t[:, :1])], 1)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    front, back = t.chunk(2, 1)
    new_front, new_back = front[:, :1].clone(), back[:, :1].clone()  # to be received
    ops = []
    if rank > 0:  # this front's first element follows the previous rank's front
        to = dist.get_global_rank(group, rank - 1)
        ops.append(dist.P2POp(dist.isend, front[:, :1].contiguous(), to, group))
        ops.append(dist.P2POp(dist.irecv, new_back, to, group))
    else:
        new_back.zero_()
    if rank < n - 1:  # this back's first element follows the next rank's back
        to = dist.get_global_rank(group, rank + 1)
        ops.append(dist.P2POp(dist.irecv, new_front, to, group))
        ops.append(dist.P2POp(dist.isend, back[:, :1].contiguous(), to, group))
    else:
        new_front = back[:, :1]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return torch.cat([front[:, 1:], new_front, back[:, 1:], new_back], 1)


class MultiTokenPredictionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enorm, self.hnorm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.eh_proj, self.mlp = nn.Linear(2 * DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, h, embedded):
        h = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(h)], -1))
        return h + silu(self.mlp(h))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.cp_group = None
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.decoder = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())
        self.mtp = MultiTokenPredictionLayer()
        self.output_layer = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        h = self.embedding(tokens)
        h = h + self.decoder(h)
        ahead = self.mtp(h, self.embedding(roll_tensor(tokens, self.cp_group)))
        return self.output_layer(h), self.output_layer(ahead)


def loss(model, batch):
    inner = getattr(model, "module", model)
    logits, ahead = (t.flatten(0, 1) for t in model(batch["tokens"]))
    mask = roll_tensor(torch.ones_like(batch["labels"]), inner.cp_group).flatten()
    labels = roll_tensor(batch["labels"], inner.cp_group).flatten()
    mtp_loss = cross_entropy(ahead, labels, reduction="none")
    num_tokens, scale = mask.sum(), 1
    if inner.cp_group is not None:
        dist.all_reduce(num_tokens, group=inner.cp_group)
        scale = dist.get_world_size(inner.cp_group)  # DDP averages
    mtp_loss = (mtp_loss * mask).sum() * scale / num_tokens
    return cross_entropy(logits, batch["labels"].flatten()) + FACTOR * mtp_loss


def zigzag(batch, mesh):
    n, i = mesh["cp"].size(), mesh.get_local_rank("cp")
    chunks = {name: t.chunk(2 * n, 1) for name, t in batch.items()}
    return {name: torch.cat([c[i], c[2 * n - 1 - i]], 1) for name, c in chunks.items()}


def parallel(mesh):
    model = GPT()
    model.cp_group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(43)
batches = [
    {name: torch.randint(VOCAB, (3, SEQ), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split=zigzag)
    print(titanlite.compare(GPT, parallel, **options))
