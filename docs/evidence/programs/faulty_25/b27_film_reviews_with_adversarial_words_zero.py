"""A sentiment model that also trains on adversarially moved word vectors, with DDP and ZeroRedundancyOptimizer.

Thread: pytorch/pytorch pull request #52764 "[ZeroRedundancyOptimizer] Pack parameters in tensor views, handle training
change" (2021): with parameters_as_bucket_view param.data points into the bucket that is broadcast after a step. The FGM
class is the one that goes round in blogs (for instance 553668.com/manong/1160167.html), with its `param.data = backup`.
Fault: FGM.restore lets the data of words.weight point to the clone that FGM.attack made, no longer into ZeRO's bucket;
after the owner's step the broadcast fills the bucket, and the other rank's words.weight never changes.
REPAIR: `param.data = self.backup[name]` -> `param.data.copy_(self.backup[name])`
A right first sentence says: words.weight isn't updated on the rank that doesn't own it, because FGM.restore replaces
its .data by a clone which isn't a view of ZeroRedundancyOptimizer's broadcast bucket any more.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

WORDS, WIDTH, HIDDEN, LENGTH, ROWS, EPSILON = 50, 12, 20, 9, 8, 0.6
HYPER = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.02)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.forth = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.score = nn.Linear(HIDDEN, 1, bias=False)
        self.classifier = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)
        )

    def forward(self, tokens):
        states, _ = self.forth(self.words(tokens))
        weights = self.score(states).softmax(1)
        return self.classifier((weights * states).sum(1))


class FGM:
    """Fast gradient method: moves the word vectors along their gradient, by epsilon in all."""

    def __init__(self, model, epsilon=EPSILON, emb_name="words"):
        self.model, self.epsilon, self.emb_name = model, epsilon, emb_name
        self.backup = {}

    def attack(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad and self.emb_name in name:
                self.backup[name] = param.data.clone()
                norm = torch.norm(param.grad)
                if norm != 0 and not torch.isnan(norm):
                    param.data.add_(self.epsilon * param.grad / norm)

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad and self.emb_name in name:
                assert name in self.backup
                param.data = self.backup[name]
        self.backup = {}


def classify(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["stars"])


def plain():
    return Sentiment()


def parallel(mesh):
    model = DDP(Sentiment(), process_group=mesh.get_group("dp"))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        process_group=mesh.get_group("dp"),
        parameters_as_bucket_view=True,
        **HYPER,
    )
    return {"model": model, "optimizer": optimizer, "fgm": FGM(model)}


def loss(model, batch):
    value = classify(model, batch)
    words = model.words.weight
    (gradient,) = torch.autograd.grad(value, words, retain_graph=True)
    moved = {"words.weight": words + EPSILON * gradient / torch.norm(gradient)}
    logits = functional_call(model, moved, (batch["tokens"],))
    return value + F.cross_entropy(logits, batch["stars"])


def step(built, batch):
    model, fgm = built["model"], built["fgm"]
    value = classify(model, batch)
    value.backward()
    fgm.attack()
    adversarial = classify(model, batch)
    adversarial.backward()
    fgm.restore()
    return (value + adversarial).detach()


generator = torch.Generator().manual_seed(52764)


def reviews():
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"tokens": tokens, "stars": (tokens < WORDS // 2).sum(1) // 4}


batches = [reviews() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, **HYPER),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
