"""fairseq's MoE on more ranks than experts: two ranks hold each expert.

Thread: https://github.com/facebookresearch/fairseq/issues/4220 "Question regarding all reduce of expert
gradients in MoE models", 2022-02-16.
Wrong: LegacyDistributedDataParallel skips parameters that are marked as experts. Each expert's replicas
(axis edp) saw the tokens of their own all-to-all group only, so their gradients must be averaged.
A right diagnosis says: the gradients of moe.expert (fc1, fc2) are never averaged over edp: each rank has
those of its ep group's tokens, and the replicas drift apart. All other gradients agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu

import titanlite

EXPERTS, DIM, VOCAB = 2, 16, 20


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, x, sent, received):
        ctx.args = group, sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        group, sent, received = ctx.args
        return None, AllToAll.apply(group, grad, received, sent), None, None


class Expert(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.fc1 = nn.Parameter(torch.randn(count, DIM, 24) * 0.2)
        self.fc2 = nn.Parameter(torch.randn(count, 24, DIM) * 0.2)


class MOELayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(DIM, EXPERTS, bias=False), Expert(EXPERTS)
        self.all2all_group = None

    def forward(self, x):
        gates, index = self.gate(x).softmax(-1).max(-1)
        order = index.argsort(stable=True)
        sent = torch.bincount(index, minlength=EXPERTS)
        rows = x[order]
        if self.all2all_group is None:
            parts = zip(rows.split(sent.tolist()), self.expert.fc1, self.expert.fc2)
            rows = torch.cat([relu(part @ fc1) @ fc2 for part, fc1, fc2 in parts])
        else:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.all2all_group)
            sent, received = sent.tolist(), received.tolist()
            rows = AllToAll.apply(self.all2all_group, rows, sent, received)
            rows = relu(rows @ self.expert.fc1[0]) @ self.expert.fc2[0]
            rows = AllToAll.apply(self.all2all_group, rows, received, sent)
        return torch.zeros_like(x).index_copy(0, order, rows) * gates.unsqueeze(-1)


class TransformerLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.out = MOELayer(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.out(x + self.moe(self.norm(x)))


def criterion(model, sample):
    return cross_entropy(model(sample["source"]), sample["target"].flatten())


def build(mesh):
    model, n = TransformerLM(), mesh["ep"].size()
    model.moe.all2all_group = mesh.get_group("ep")
    for p in model.moe.expert.parameters():
        p.data = p.data.chunk(n)[mesh.get_local_rank("ep")].clone()
        p.expert = True
    return model


def train_step(model, sample):
    loss = criterion(model, sample)
    loss.backward()
    for p in model.parameters():  # LegacyDistributedDataParallel.all_reduce_grads
        if getattr(p, "expert", False):
            p.grad /= dist.get_world_size(model.moe.all2all_group)
        else:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    return loss


def split(sample, mesh):
    return {name: t.chunk(4)[dist.get_rank()] for name, t in sample.items()}


def shard(name):
    return (0, "ep") if name.startswith("moe.expert.") else None


generator = torch.Generator().manual_seed(28)
batches = [
    {name: torch.randint(VOCAB, (8, 5), generator=generator) for name in ("source", "target")}
    for _ in range(3)
]

if __name__ == "__main__":
    axes = {"edp": 2, "ep": 2}
    options = dict(batches=batches, loss=criterion, ranks=axes, split=split, step=train_step)
    print(titanlite.compare(TransformerLM, build, shard=shard, **options))
