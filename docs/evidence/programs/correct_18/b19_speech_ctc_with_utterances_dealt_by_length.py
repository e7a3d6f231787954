"""A CTC speech recognizer whose ranks deal the batch's utterances by length; hooks sum the gradients as they are finished.

Might be accused because: each rank is handed the whole batch but works on other rows, in another order and of another number than
the other rank; it pads them to its own longest utterance; the gradients are summed over the ranks and never averaged.
Correct because: every utterance is on exactly one rank; a rank's loss is its sum over utterances divided by the number of labels
in the whole batch, which all ranks see, so the sum of the gradients is that of the plain loss. Masks keep the padding out of the
convolutions and no layer mixes utterances, so neither order nor padded length matters.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

FEATURES, WIDTH, SYMBOLS, ROWS, LONGEST, LABELS = 6, 12, 7, 7, 20, 4


class ConvModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        y = F.glu(self.gate(self.norm(x))) * mask
        y = self.depthwise(y.mT).mT
        return x + self.out(F.silu(y))


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(ConvModule() for _ in range(2))
        self.norm, self.symbols = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, features, lengths):
        mask = torch.arange(features.size(1)) < lengths.unsqueeze(1)
        mask = mask.unsqueeze(-1).to(features)
        x = self.inputs(features)
        for layer in self.layers:
            x = layer(x, mask)
        return self.symbols(self.norm(x)).log_softmax(-1)


def ctc_sum(model, batch):
    logp = model(batch["features"], batch["lengths"])
    return F.ctc_loss(
        logp.transpose(0, 1),
        batch["labels"],
        batch["lengths"],
        batch["label_lengths"],
        reduction="sum",
    )


def deal(lengths, ranks):
    """Longest first, each to the rank with the fewest frames so far; every rank finds the same."""
    frames, hands = [0] * ranks, [[] for _ in range(ranks)]
    for row in lengths.argsort(descending=True, stable=True).tolist():
        rank = frames.index(min(frames))
        frames[rank] += lengths[row].item()
        hands[rank].append(row)
    return hands


def own_utterances(batch, group):
    rows = deal(batch["lengths"], dist.get_world_size(group))[dist.get_rank(group)]
    mine = {name: tensor[rows] for name, tensor in batch.items()}
    mine["features"] = mine["features"][:, : mine["lengths"].max()]
    mine["labels"] = mine["labels"][:, : mine["label_lengths"].max()]
    return mine


class SummedGradients:
    """Starts to sum a parameter's gradient as soon as it is complete."""

    def __init__(self, model, group):
        self.group, self.pending = group, []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        self.pending.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def finish(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


def plain():
    return Recognizer()


def parallel(mesh):
    model = Recognizer()
    return model, SummedGradients(model, mesh.get_group("dp"))


def loss(model, batch):
    return ctc_sum(model, batch) / batch["label_lengths"].sum()


def step(built, batch):
    model, gradients = built
    value = ctc_sum(model, own_utterances(batch, gradients.group))
    value = value / batch["label_lengths"].sum()
    value.backward()
    gradients.finish()
    value = value.detach().clone()
    dist.all_reduce(value, group=gradients.group)
    return value


generator = torch.Generator().manual_seed(7)


def utterances():
    lengths = torch.randint(9, LONGEST + 1, (ROWS,), generator=generator)
    label_lengths = torch.randint(1, LABELS + 1, (ROWS,), generator=generator)
    features = torch.randn(ROWS, LONGEST, FEATURES, generator=generator, dtype=torch.float64)
    valid = torch.arange(LONGEST) < lengths.unsqueeze(1)
    return {
        "features": features * valid.unsqueeze(-1),
        "lengths": lengths,
        "labels": torch.randint(1, SYMBOLS, (ROWS, LABELS), generator=generator),
        "label_lengths": label_lengths,
    }


batches = [utterances() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
