"""Context parallelism for a Mamba-like mixer: halo for the convolution, passing of states for the scan.

Thread: https://github.com/state-spaces/mamba/issues/597 "Context parallel implementation for Mamba 2",
2024-10-18.
Right: the convolution reads the last tokens of the previous rank. The scan is linear, so each rank
scans from a zero state, gathers all ranks' decays and final states, and adds the decayed state of the
ranks before it. Both gathers send gradients back.
Must not be accused: gathered boundary tokens, a scan from zero whose output is corrected later.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import conv1d, cross_entropy, silu, softplus

import titanlite

DIM, STATE, KERNEL, VOCAB = 12, 3, 4, 20


class GatherFromRanks(torch.autograd.Function):
    """[...] -> [ranks, ...]"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


class ContextMixer(nn.Module):
    """prepends the previous rank's last tokens"""

    group = None

    def forward(self, x):  # [b, d, s]
        tail = torch.zeros_like(x[..., : KERNEL - 1])
        if self.group is not None:
            tails = GatherFromRanks.apply(x[..., 1 - KERNEL :], self.group)
            rank = dist.get_rank(self.group)
            tail = tails[rank - 1] * (rank > 0)
        return torch.cat([tail, x], -1)


class Mamba(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(DIM, 2 * DIM)
        self.context_mixer = ContextMixer()
        self.conv = nn.Conv1d(DIM, DIM, KERNEL, groups=DIM)
        self.x_proj = nn.Linear(DIM, DIM + 2 * STATE)
        self.A_log = nn.Parameter(torch.zeros(DIM, STATE))
        self.out_proj = nn.Linear(DIM, DIM)

    def forward(self, u):
        x, z = self.in_proj(u).chunk(2, -1)
        x = self.context_mixer(x.transpose(1, 2))
        x = silu(conv1d(x, self.conv.weight, self.conv.bias, groups=DIM)).transpose(1, 2)
        delta, b, c = self.x_proj(x).split([DIM, STATE, STATE], -1)
        log_decay = -softplus(delta)[..., None] * self.A_log.exp()
        new = (softplus(delta) * x)[..., None] * b[:, :, None]
        state, states = torch.zeros_like(new[:, 0]), []
        for t in range(u.shape[1]):
            state = log_decay[:, t].exp() * state + new[:, t]
            states.append(state)
        states = torch.stack(states, 1)
        if self.group is not None:
            total = log_decay.cumsum(1)
            finals = GatherFromRanks.apply(state, self.group)
            decays = GatherFromRanks.apply(total[:, -1], self.group).exp()
            # the zero keeps both gathers in every rank's graph: all must take part in their backward
            before = 0 * (finals.sum(0) + decays.sum(0))
            for rank in range(dist.get_rank(self.group)):
                before = decays[rank] * before + finals[rank]
            states = states + total.exp() * before[:, None]
        y = (states * c[:, :, None]).sum(-1)
        return self.out_proj(y * silu(z))


class MambaLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.mixers = nn.ModuleList(Mamba() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.lm_head(x)


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = MambaLM()
    for mixer in model.mixers:
        mixer.group = mixer.context_mixer.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(48)
batches = [
    {name: torch.randint(VOCAB, (3, 10), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(MambaLM, parallel, **options))
