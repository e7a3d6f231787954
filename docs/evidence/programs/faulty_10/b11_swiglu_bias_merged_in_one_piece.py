"""Tensor parallelism over two ranks, started from a checkpoint that was written by four.

Thread: NVIDIA/Megatron-LM pull request #346 "[Fix] mlp-bias concatenation in checkpoint_util when using swiglu" (2023): "When
use swiglu, checkpoint_util.py only handle the mlp weight concatenation and forget to handle the mlp bias."
Fault: in merge, the halves (gate and up) of the shards' fc1.weight are concatenated each for itself, those of fc1.bias are
not, so gate and up are mixed in the merged bias.
REPAIR: `name.endswith("fc1.weight")` -> `".fc1." in name`
Expected: before step 1, fc1.bias of both mlps has wrong rows on both ranks (they belong to gate and up of other shards);
all other starting weights agree, fc1.weight too: merge puts the four shards of the bias one after the other, without
regard to their two halves.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, silu

import titanlite

VOCAB, HIDDEN, FFN, SAVED_TP = 12, 8, 16, 4


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class MLP(nn.Module):
    def __init__(self, tp=1, group=None):
        super().__init__()
        self.group = group
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * FFN // tp), nn.Linear(FFN // tp, HIDDEN)

    def forward(self, x):
        if self.group is None:
            gate, up = self.fc1(x).chunk(2, -1)
            return self.fc2(silu(gate) * up)
        gate, up = self.fc1(F.apply(x, self.group)).chunk(2, -1)
        return G.apply(linear(silu(gate) * up, self.fc2.weight), self.group) + self.fc2.bias


class Transformer(nn.Module):
    def __init__(self, tp=1, group=None):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.mlps = nn.ModuleList(MLP(tp, group) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.output = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        for norm, mlp in zip(self.norms, self.mlps):
            x = x + mlp(norm(x + x.cumsum(1) / 4))
        return self.output(x)


def split(name, whole, tp):
    """A parameter's shards; of fc1, each rank has its part of the gate and its part of up."""
    if ".fc1." in name:
        return [torch.cat(halves) for halves in zip(*(h.chunk(tp) for h in whole.chunk(2)))]
    return list(whole.chunk(tp, 1)) if name.endswith("fc2.weight") else [whole] * tp


def merge(name, shards):
    if name.endswith("fc1.weight"):
        gates, ups = zip(*(shard.chunk(2) for shard in shards))
        return torch.cat(gates + ups)
    if name.endswith("fc1.bias"):
        return torch.cat(shards)
    return torch.cat(shards, 1) if name.endswith("fc2.weight") else shards[0]


def checkpoint(model):
    """What a run over SAVED_TP ranks has written: one state dict per rank."""
    pieces = {name: split(name, t, SAVED_TP) for name, t in model.state_dict().items()}
    return [{name: parts[rank] for name, parts in pieces.items()} for rank in range(SAVED_TP)]


def parallel(mesh):
    group, tp, rank = mesh.get_group("tp"), mesh.size(), mesh.get_rank()
    saved = checkpoint(Transformer())
    whole = {name: merge(name, [shard[name] for shard in saved]) for name in saved[0]}
    model = Transformer(tp, group)
    model.load_state_dict({name: split(name, t, tp)[rank] for name, t in whole.items()})
    return model


def shard(name):
    if ".fc1." in name:
        return lambda whole: split(name, whole, 2)[dist.get_rank()]
    return (1, "tp") if name.endswith("fc2.weight") else None


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


rng = torch.Generator().manual_seed(305)
batches = []
for _ in range(3):
    tokens = torch.randint(VOCAB, (4, 7), generator=rng)
    batches.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
