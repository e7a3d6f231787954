"""A small Mamba-2 language model whose blocks are cut over tensor ranks, with mamba_ssm's process_group argument.

Thread: state-spaces/mamba pull requests #908, #916, #951 "fix(mamba2): use self.ngroups for RMSNormGated group_size
under tensor parallel" (2026): d_ssm has been divided by the world size, the number of groups below it hasn't.
Fault: Mamba2.__init__ gives its gated norm group_size = self.d_ssm // ngroups, a local width over the number of groups
of all ranks; on two ranks a group of the norm is half as wide as that of the model in one process.
REPAIR: `group_size=self.d_ssm // ngroups` -> `group_size=self.d_ssm // self.ngroups`
A right first sentence says: the gated norm of the Mamba-2 mixers normalizes over groups that are too narrow on each
rank (half the width of the whole model's groups), so its output is wrong; the cause is its group size, no reduction.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, D_MODEL, D_STATE, HEADDIM, NGROUPS, D_CONV, LAYERS = 23, 16, 4, 4, 2, 3, 2


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        grad_input = grad_output.contiguous().clone()
        dist.all_reduce(grad_input, group=ctx.process_group)
        return grad_input, None


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, process_group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=process_group)
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class RMSNormGated(nn.Module):
    def __init__(self, hidden_size, group_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.group_size, self.eps = group_size, eps

    def forward(self, x, z):
        x = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x.flatten(-2) * self.weight


class Mamba2(nn.Module):
    def __init__(self, d_model, expand=2, headdim=HEADDIM, ngroups=NGROUPS, process_group=None):
        super().__init__()
        self.process_group = process_group
        self.world_size = 1 if process_group is None else process_group.size()
        self.d_ssm = expand * d_model // self.world_size
        self.ngroups = ngroups // self.world_size
        self.nheads = self.d_ssm // headdim
        self.z_proj = nn.Linear(d_model, self.d_ssm, bias=False)
        self.x_proj = nn.Linear(d_model, self.d_ssm, bias=False)
        self.b_proj = nn.Linear(d_model, self.ngroups * D_STATE, bias=False)
        self.c_proj = nn.Linear(d_model, self.ngroups * D_STATE, bias=False)
        self.dt_proj = nn.Linear(d_model, self.nheads)
        n, pad = self.d_ssm, D_CONV - 1
        self.conv1d = nn.Conv1d(n, n, D_CONV, groups=n, padding=pad)
        self.A_log = nn.Parameter(torch.rand(self.nheads))
        self.D = nn.Parameter(torch.rand(self.nheads))
        self.norm = RMSNormGated(self.d_ssm, group_size=self.d_ssm // ngroups)
        self.out_proj = nn.Linear(self.d_ssm, d_model, bias=False)

    def forward(self, u):
        if self.process_group is not None:
            u = CopyToRanks.apply(u, self.process_group)
        x = self.conv1d(self.x_proj(u).transpose(1, 2))[..., : u.size(1)].transpose(1, 2)
        x = F.silu(x).unflatten(-1, (self.nheads, -1))
        repeats = self.nheads // self.ngroups
        b, c = (
            F.silu(proj(u)).unflatten(-1, (self.ngroups, D_STATE)).repeat_interleave(repeats, 2)
            for proj in (self.b_proj, self.c_proj)
        )
        dt = F.softplus(self.dt_proj(u))
        y = self.scan(x, dt, torch.exp(-dt * self.A_log.exp()), b, c) + self.D.unsqueeze(-1) * x
        out = self.out_proj(self.norm(y.flatten(2), self.z_proj(u)))
        return ReduceFromRanks.apply(out, self.process_group) if self.process_group else out

    def scan(self, x, dt, decay, b, c):
        state, outputs = x.new_zeros(x.size(0), *x.shape[2:], D_STATE), []
        for t in range(x.size(1)):
            update = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(2)
            state = decay[:, t, :, None, None] * state + update
            outputs.append((state * c[:, t].unsqueeze(2)).sum(-1))
        return torch.stack(outputs, 1)


class MixerModel(nn.Module):
    def __init__(self, process_group=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D_MODEL)
        self.norms = nn.ModuleList(nn.RMSNorm(D_MODEL) for _ in range(LAYERS + 1))
        mixers = (Mamba2(D_MODEL, process_group=process_group) for _ in range(LAYERS))
        self.mixers = nn.ModuleList(mixers)
        self.lm_head = nn.Linear(D_MODEL, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return self.lm_head(self.norms[-1](x))


def shard(name):
    dim = 1 if "out_proj" in name else 0
    return (dim, "tp") if "mixers" in name else None


def plain():
    return MixerModel()


def parallel(mesh):
    whole, group = MixerModel(), mesh.get_group("tp")
    model = MixerModel(group)
    state = whole.state_dict()
    for name, value in state.items():
        if shard(name):
            state[name] = value.chunk(group.size(), shard(name)[0])[group.rank()]
    model.load_state_dict(state)
    return model


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


generator = torch.Generator().manual_seed(908)
batches = [torch.randint(VOCAB, (4, 9), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
