"""Speech pretraining after wav2vec 2.0: masked frames find their quantized latents, and the codes stay diverse; data parallel.

Thread: huggingface/transformers issue #14471 "Wav2Vec2ForPreTraining in 4.12 broke SpeechBrain implementation" (2021): earlier,
the contrastive loss was a sum over the masked frames while the diversity loss wasn't multiplied by their number.
Fault: SpeechTrainer.backward adds the diversity loss as it is to the sum of the contrastive losses; the gradients are divided
by the number of masked frames of all ranks later, and the diversity loss almost vanishes.
REPAIR: `value = contrastive + DIVERSITY * diversity` -> `value = contrastive + DIVERSITY * diversity * targets`
A right first sentence says: the diversity loss isn't multiplied by the rank's number of masked frames although everything is
divided by the total number of masked frames afterwards, so its part of loss and gradients is far too small.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SAMPLES, STRIDE, WIDTH, CODES, UTTERANCES = 48, 4, 10, 8, 6
FRAMES = SAMPLES // STRIDE
DIVERSITY, TEMPERATURE = 0.5, 0.3


class FeatureEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(1, WIDTH, 4, stride=2, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 4, stride=2, padding=1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, waves):
        x = F.gelu(self.conv1(waves.unsqueeze(1)))
        return self.norm(F.gelu(self.conv2(x)).mT)


class Quantizer(nn.Module):
    """A soft choice from a codebook."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(WIDTH, CODES)
        self.codebook = nn.Parameter(torch.randn(CODES, WIDTH))

    def forward(self, latents):
        chosen = (2 * self.scores(latents)).softmax(-1)
        return chosen @ self.codebook, chosen


class Wav2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer = FeatureEncoder(), Quantizer()
        self.mask_embedding = nn.Parameter(torch.randn(WIDTH))
        self.context = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.project = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, waves, mask):
        """The sum of the contrastive losses, and the sum of the codes' probabilities."""
        latents = self.encoder(waves)
        quantized, chosen = self.quantizer(latents)
        hidden = torch.where(mask.unsqueeze(-1), self.mask_embedding, latents)
        predicted = self.project(self.context(hidden)[0])
        scores = F.normalize(predicted, dim=-1) @ F.normalize(quantized, dim=-1).mT / TEMPERATURE
        scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        right = torch.arange(FRAMES).expand(len(waves), -1)
        contrastive = F.cross_entropy(scores[mask], right[mask], reduction="sum")
        return contrastive, chosen[mask].sum(0)


def diversity_loss(probabilities):
    entropy = -(probabilities * (probabilities + 1e-9).log()).sum()
    return (CODES - entropy.exp()) / CODES


class SpeechTrainer:
    def __init__(self, model, group):
        self.model, self.group = model, group

    def total(self, x):
        x = x.detach().clone()
        dist.all_reduce(x, group=self.group)
        return x

    def backward(self, waves, mask):
        targets = mask.sum()
        all_targets = self.total(targets)
        contrastive, codes = self.model(waves, mask)
        codes = dist_nn.all_reduce(codes, group=self.group)
        diversity = diversity_loss(codes / all_targets)
        value = contrastive + DIVERSITY * diversity
        value.backward()
        self.reduce_gradients(all_targets)
        return self.total(value) / all_targets

    def reduce_gradients(self, count):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= count


def plain():
    return Wav2Vec()


def parallel(mesh):
    model = Wav2Vec()
    return model, SpeechTrainer(model, mesh.get_group("dp"))


def loss(model, batch):
    waves, mask = batch
    contrastive, codes = model(waves, mask)
    return contrastive / mask.sum() + DIVERSITY * diversity_loss(codes / mask.sum())


def step(built, batch):
    return built[1].backward(*batch)


generator = torch.Generator().manual_seed(14471)


def utterances():
    waves = torch.randn(UTTERANCES, SAMPLES, generator=generator, dtype=torch.float64)
    mask = torch.rand(UTTERANCES, FRAMES, generator=generator) < 0.5
    mask[:, 2:4] = True
    return waves.cumsum(1) / 3, mask


batches = [utterances() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
