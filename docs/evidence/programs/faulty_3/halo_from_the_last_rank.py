"""A causal convolution over sequence shards whose halo goes round in a ring.

Thread: https://github.com/distdl/distdl/issues/178 "Refactor halo calculation for convolutions" (padding is
not taken into account correctly), 2020-11-15.
Wrong: every rank puts the last two frames of the rank before it in front of its own. For rank 0 these are the
last rank's frames, where the sequence should be padded with zeros.
A right diagnosis says: on rank 0 only, the first frames of the output of conv differ (what conv receives
from its halo exchange): frames of the last rank stand where the padding should be; the other ranks' forward
pass agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import conv1d, mse_loss

import titanlite

CHANNELS, MELS, KERNEL = 12, 6, 3


class HaloExchange(torch.autograd.Function):
    """sends frames to the rank `shift` places further on, and their gradient back"""

    @staticmethod
    def forward(ctx, x, group, shift):
        ctx.args = group, shift
        x = x.contiguous()
        out = torch.empty_like(x)
        to, source = (group.rank() + shift) % group.size(), (group.rank() - shift) % group.size()
        ops = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(group, to), group),
            dist.P2POp(dist.irecv, out, dist.get_global_rank(group, source), group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        group, shift = ctx.args
        return HaloExchange.apply(grad, group, -shift), None, None


class CausalConv(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS, KERNEL) * 0.2)
        self.bias = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x):
        if self.group is None:
            halo = x.new_zeros(*x.shape[:-1], KERNEL - 1)
        else:
            halo = HaloExchange.apply(x[..., 1 - KERNEL :], self.group, 1)
        return conv1d(torch.cat([halo, x], -1), self.weight, self.bias)


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre, self.post = nn.Linear(MELS, CHANNELS), nn.Linear(CHANNELS, MELS)
        self.conv, self.norm = CausalConv(), nn.LayerNorm(CHANNELS)

    def forward(self, mel):
        x = torch.tanh(self.pre(mel))
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.post(x + torch.relu(self.norm(y)))


def loss(model, batch):
    return mse_loss(model(batch["mel"]), batch["target"])


def average_gradients(model, group):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


def parallel(mesh):
    model = Vocoder()
    model.conv.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    average_gradients(model, model.conv.group)
    return value


generator = torch.Generator().manual_seed(178)
batches = [
    {name: torch.randn(2, 12, MELS, generator=generator) for name in ("mel", "target")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 3}, split={"cp": 1}, step=step)
    print(titanlite.compare(Vocoder, parallel, **options))
