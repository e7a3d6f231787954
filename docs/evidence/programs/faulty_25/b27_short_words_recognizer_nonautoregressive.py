"""A recognizer of spoken commands in the style of Paraformer in FunASR, under DDP with weighted averages of losses.

Thread: modelscope/FunASR pull requests #1157, #1160 and #1161 "fix loss normalization for ddp training": the
trainer multiplies each rank's loss by the weight that the model returns, divides by the sum of the weights and undoes
DDP's division; for a loss that is normalized by length the weight is to be the number of tokens, and in FunASR's models
it now is `int((text_lengths + self.predictor_bias).sum())`.
Fault: Paraformer.forward returns the number of utterances as the weight, though both of its losses are means over the
tokens of the rank; ranks with few tokens count as much as ranks with many.
REPAIR: `batch_size = speech.size(0)` -> `batch_size = int((text_lengths + self.predictor_bias).sum())`
A right first sentence says: the losses of Paraformer are means over the rank's own tokens but are averaged over the
ranks with the numbers of utterances as weights (a mean of means), not with the numbers of tokens.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

BINS, FRAMES, WIDTH, HEADS, TOKENS, LONGEST, ROWS = 8, 24, 16, 2, 12, 6, 8
EOS, IGNORE = TOKENS - 1, -1


def attend(q, k, v, mask):
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    return y.transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        x = x + self.out(attend(*self.qkv(self.norm1(x)).chunk(3, dim=-1), mask))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Predictor(nn.Module):
    """Continuous integrate-and-fire: a token's share of a frame is where their intervals meet."""

    def __init__(self):
        super().__init__()
        self.conv, self.alpha = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, 1)

    def forward(self, x, mask, lengths):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2) + x
        alphas = self.alpha(h).squeeze(-1).sigmoid() * mask
        counted = alphas.sum(-1)
        ends = (alphas * (lengths / counted).unsqueeze(-1)).cumsum(-1).unsqueeze(1)
        starts = F.pad(ends, (1, 0))[..., :-1]
        token = torch.arange(LONGEST + 1).view(1, -1, 1)
        shares = (torch.minimum(ends, token + 1) - torch.maximum(starts, token)).clamp(min=0)
        return shares @ x, counted


class Paraformer(nn.Module):
    def __init__(self, predictor_weight=0.5, predictor_bias=1):
        super().__init__()
        self.predictor_weight, self.predictor_bias = predictor_weight, predictor_bias
        self.embed, self.position = nn.Linear(BINS, WIDTH), nn.Embedding(FRAMES, WIDTH)
        self.encoders = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.predictor, self.decoder = Predictor(), EncoderLayer()
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, speech, speech_lengths, text, text_lengths):
        batch_size = speech.size(0)
        mask = torch.arange(FRAMES) < speech_lengths.unsqueeze(-1)
        x = self.embed(speech) + self.position.weight
        for layer in self.encoders:
            x = layer(x, mask)
        ys = self.add_eos(text, text_lengths)
        lengths = text_lengths + self.predictor_bias
        acoustic, counted = self.predictor(x, mask, lengths)
        logits = self.output(self.decoder(acoustic, ys != IGNORE))
        loss_att = F.cross_entropy(logits.flatten(0, 1), ys.flatten(), ignore_index=IGNORE)
        loss_pre = (counted - lengths).abs().sum() / lengths.sum()
        loss = loss_att + self.predictor_weight * loss_pre
        return loss, {"loss_att": loss_att.detach(), "loss_pre": loss_pre.detach()}, batch_size

    def add_eos(self, text, text_lengths):
        ys = F.pad(text, (0, 1), value=IGNORE)
        return ys.scatter(1, text_lengths.unsqueeze(-1), EOS)


class Trainer:
    def __init__(self, model, group):
        self.model, self.group = model, group

    def average(self, values, weight):
        """The weighted averages over the ranks, and the sum of the weights."""
        summed = torch.stack([*(value.detach() * weight for value in values), weight])
        dist.all_reduce(summed, group=self.group)
        return summed[:-1] / summed[-1], summed[-1]

    def train_batch(self, batch):
        loss, stats, weight = self.model(**batch)
        weight = loss.new_tensor(weight)
        (reported, *_), total = self.average([loss, *stats.values()], weight)
        loss = loss * weight / total * self.group.size()
        loss.backward()
        return reported


def plain():
    return Paraformer()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Paraformer(), process_group=group)
    return model, Trainer(model, group)


def loss(model, batch):
    return model(**batch)[0]


def step(built, batch):
    return built[1].train_batch(batch)


generator = torch.Generator().manual_seed(1157)


def utterances():
    text_lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=generator)
    text = torch.randint(EOS, (ROWS, LONGEST), generator=generator)
    text = text.masked_fill(torch.arange(LONGEST) >= text_lengths.unsqueeze(-1), IGNORE)
    speech = torch.randn(ROWS, FRAMES, BINS, generator=generator, dtype=torch.float64)
    lengths = {"speech_lengths": 3 * text_lengths + 5, "text_lengths": text_lengths}
    return {"speech": speech, "text": text, **lengths}


batches = [utterances() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, split="dp", ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
