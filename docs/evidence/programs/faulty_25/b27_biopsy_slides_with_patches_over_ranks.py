"""Multiple-instance learning on biopsy slides: the patches of a slide lie on several ranks, attention pools over all.

Thread: pytorch/pytorch issue #190007 "all_reduce backward only supports 'sum' reduction" and pull request #190224
(2026: max and min "do not have a same-op all-reduce gradient", which torch.distributed.nn.functional.all_reduce uses
all the same), also hpcaitech/CachedEmbedding pull request #86 "Add all-reduce backward logic for max and mean".
Fault: GlobalAttentionPool takes the maximum of the scores by the differentiable all_reduce with ReduceOp.MAX, whose
backward pass takes the maximum over the ranks of the gradients. Their sum, which is due, would be zero with the rest
(the softmax doesn't depend on the shift); so the highest score of each rank gets a false gradient.
REPAIR: `top = scores.amax(1, keepdim=True)` -> `top = scores.detach().amax(1, keepdim=True)`
A right first sentence says: the gradient of the attention scores (so of pool.score, pool.gate, pool.tanh, encoder) is
wrong, as the all_reduce of their maximum has for its backward pass a MAX over the ranks of the gradients.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

FEATURES, WIDTH, HIDDEN, GRADES, PATCHES, SLIDES = 10, 16, 12, 4, 12, 6


class PatchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.deepen = nn.Linear(WIDTH, WIDTH)

    def forward(self, patches):
        x = F.gelu(self.enter(patches))
        return x + F.gelu(self.deepen(self.norm(x)))


class GatedAttentionPool(nn.Module):
    """Attention-based pooling of Ilse, Tomczak and Welling."""

    def __init__(self):
        super().__init__()
        self.tanh, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1, bias=False)

    def scores(self, x):
        return self.score(torch.tanh(self.tanh(x)) * torch.sigmoid(self.gate(x)))

    def forward(self, x):
        return (self.scores(x).softmax(1) * x).sum(1)


class GlobalAttentionPool(GatedAttentionPool):
    """The same where each rank has some of the patches: a softmax over the patches of all ranks."""

    group = None

    def forward(self, x):
        scores = self.scores(x)
        top = scores.amax(1, keepdim=True)
        top = all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        weights = (scores - top).exp()
        total = all_reduce(weights.sum(1), group=self.group)
        pooled = all_reduce((weights * x).sum(1), group=self.group)
        return pooled / total


class SlideGrader(nn.Module):
    def __init__(self, pool=GatedAttentionPool):
        super().__init__()
        self.encoder, self.pool = PatchEncoder(), pool()
        self.head = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, GRADES)
        )

    def forward(self, patches):
        return self.head(self.pool(self.encoder(patches)))


def plain():
    return SlideGrader()


def parallel(mesh):
    model = SlideGrader(GlobalAttentionPool)
    model.pool.group = mesh.get_group("patches")
    return DDP(model, process_group=mesh.get_group("patches"))


def loss(model, batch):
    return F.cross_entropy(model(batch["patches"]), batch["grade"])


def split(batch, mesh):
    """Some patches of every slide; the all_reduces sum gradients, DDP's mean takes that back."""
    index, count = mesh.get_local_rank("patches"), mesh["patches"].size()
    return {"patches": batch["patches"].chunk(count, 1)[index], "grade": batch["grade"]}


generator = torch.Generator().manual_seed(190007)


def slides():
    grade = torch.randint(0, GRADES, (SLIDES,), generator=generator)
    patches = torch.randn(SLIDES, PATCHES, FEATURES, generator=generator, dtype=torch.float64)
    tumour = torch.rand(SLIDES, PATCHES, generator=generator) < 0.3
    patches[..., 0] += 2.0 * tumour * grade.unsqueeze(1)
    patches[..., 1] += 1.5 * tumour
    return {"patches": patches, "grade": grade}


batches = [slides() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split=split,
    ranks={"patches": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
