"""MAML under DDP, with second derivatives: the meta-gradient comes from torch.autograd.grad.

Thread: https://github.com/pytorch/pytorch/issues/63929 "[Poll] Support higher-order gradient computation in DDP"
("interested in integrating DDP with meta learning/maml algorithms", comment of 2022-01-05), 2021-08-25; also
https://github.com/learnables/learn2learn/issues/391 (2023-04-11).
Wrong: DDP's hooks run when a gradient is accumulated into .grad in backward(). torch.autograd.grad returns the
gradients and runs no hook, so nothing is reduced: each rank steps along the meta-gradient of its own tasks.
EXPECT: all gradients are not reduced over dp: each rank has that of its own rows (tasks); the forward pass of step 1
agrees. DDP does not synchronize as the gradients come from torch.autograd.grad and not from backward().
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

HIDDEN, INNER_LR, SHOTS = 16, 0.05, 5


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.fc2(torch.tanh(self.fc1(x))))))


def adapt(model, x, y):
    fast = dict(model.named_parameters())
    for _ in range(2):
        value = mse_loss(functional_call(model, fast, (x,)), y)
        grads = torch.autograd.grad(value, list(fast.values()), create_graph=True)
        fast = {n: p - INNER_LR * g for (n, p), g in zip(fast.items(), grads)}
    return fast


def loss(model, batch):
    values = []
    for x, y in zip(batch["x"], batch["y"]):
        fast = adapt(model, x[:SHOTS], y[:SHOTS])
        values.append(mse_loss(functional_call(model, fast, (x[SHOTS:],)), y[SHOTS:]))
    return torch.stack(values).mean()


def parallel(mesh):
    return DistributedDataParallel(Regressor(), process_group=mesh.get_group("dp"))


def meta_step(model, batch):
    parameters = list(model.parameters())
    value = loss(model, batch)
    for p, g in zip(parameters, torch.autograd.grad(value, parameters)):
        p.grad = g
    return value.detach()


generator = torch.Generator().manual_seed(63929)


def sine_tasks(count):
    amplitude, phase = 0.5 + 2 * torch.rand(2, count, 1, 1, generator=generator)
    x = 4 * torch.rand(count, 2 * SHOTS, 1, generator=generator) - 2
    return {"x": x, "y": amplitude * torch.sin(x + phase)}


batches = [sine_tasks(4) for _ in range(3)]
arguments = Regressor, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=meta_step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
