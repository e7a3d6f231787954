"""PPO with an adaptive KL coefficient under DDP: each rank's controller follows the divergence of its own rows.

Thread: kashif/firedup pull request #3 "Update ppo.py" (2019), where the average of the KL divergence over the workers is
taken for superfluous; CarperAI/trlx pull request #361 "[fix] Update AdaptiveKLController with correct KL" (2023) has such
a controller.
Fault: in step, the controller is updated with the rank's own divergence, although the mean over the ranks is computed for
the log, so the ranks' coefficients drift apart from the second step on.
REPAIR: `model.module.controller.update(seen)` -> `model.module.controller.update(logged[1])`
Expected: step 1 agrees, loss, gradients, and weights; in step 2 the outputs agree, and the loss and all gradients are
wrong: the KL coefficient differs between the ranks and from the plain model's, because it was updated in step 1 with the
KL divergence of the own rows instead of the mean over the ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

OBSERVATIONS, ACTIONS, CLIP = 5, 4, 0.2


class KlController:
    """The coefficient grows where the divergence is above its target."""

    def __init__(self, coefficient=0.5, target=0.3, horizon=2.0):
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, divergence):
        error = min(max(float(divergence) / self.target - 1, -1.0), 1.0)
        self.coefficient *= 1 + error / self.horizon


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.logits = nn.Linear(OBSERVATIONS, 12), nn.Linear(12, ACTIONS)
        self.controller = KlController()

    def forward(self, observations):
        return self.logits(torch.tanh(self.hidden(observations))).log_softmax(-1)


def terms(model, batch):
    logps, reference = model(batch["observations"]), batch["reference"].log_softmax(-1)
    ratio = (logps - reference).gather(1, batch["actions"][:, None])[:, 0].exp()
    advantages = batch["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain.mean(), (logps.exp() * (logps - reference)).sum(-1).mean()


def loss(model, batch):
    surrogate, divergence = terms(model, batch)
    value = surrogate + model.controller.coefficient * divergence
    model.controller.update(divergence.detach())
    return value


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def step(model, batch):
    surrogate, divergence = terms(model, batch)
    value = surrogate + model.module.controller.coefficient * divergence
    value.backward()
    seen = divergence.detach()
    logged = torch.stack([value.detach(), seen])
    dist.all_reduce(logged)
    logged /= dist.get_world_size()
    model.module.controller.update(seen)
    return value


generator = torch.Generator().manual_seed(211)


def draw():
    return {
        "observations": torch.randn(8, OBSERVATIONS, generator=generator),
        "reference": torch.randn(8, ACTIONS, generator=generator),
        "actions": torch.randint(ACTIONS, (8,), generator=generator),
        "advantages": torch.randn(8, generator=generator),
    }


batches = [draw() for _ in range(3)]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
