"""A small CLIP under DDP with cached features, so that the contrast is over all chunks of all ranks.

Thread: mlfoundations/open_clip issue #957 "Apply scale loss when performing accum_freq" (2024), a copy of #761: must
the loss be divided by accum_freq before backward? Of the kind pull request #267 "Add support for gradient
accumulation." (2022).
Correct: each chunk's backward pass starts from the whole loss over all pairs, and the loss is not divided by the number
of chunks, as only the chunk's own features carry a gradient: the passes add up to the one gradient of the loss. Of
logit_scale every pass would give the whole gradient, so it is detached except in the last. The gather adds up the
ranks' equal gradients, DDP's mean undoes that; the reported loss is the same on all ranks and is not averaged.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPConfig, CLIPModel

import titanlite

VOCAB, EOS, WORDS, SIDE, PAIRS, CHUNKS = 24, 23, 6, 8, 12, 3


def build_model():
    text = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=WORDS,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=1,
    )
    vision = dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=4,
    )
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    config.initializer_factor = 3.0
    return CLIPModel(config)


def features(model, batch):
    """Normalized embeddings of images and texts."""
    output = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    return F.normalize(output.image_embeds, dim=-1), F.normalize(output.text_embeds, dim=-1)


def contrast(images, texts, scale):
    logits = scale.exp() * images @ texts.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class AccumulatingTrainer:
    def __init__(self, model, mesh):
        self.group = mesh.get_group()
        self.model = DistributedDataParallel(model, process_group=self.group)

    def gather(self, parts):
        return torch.cat(all_gather(torch.cat(parts), group=self.group))

    def training_step(self, batch):
        chunks = [
            dict(zip(batch, values))
            for values in zip(*(value.chunk(CHUNKS) for value in batch.values()))
        ]
        with torch.no_grad():
            cached = [features(self.model.module, chunk) for chunk in chunks]
        for j, chunk in enumerate(chunks):
            last = j == CHUNKS - 1
            with nullcontext() if last else self.model.no_sync():
                own = features(self.model, chunk)
                pairs = [*cached[:j], own, *cached[j + 1 :]]
                images, texts = (self.gather(parts) for parts in zip(*pairs))
                scale = self.model.module.logit_scale
                value = contrast(images, texts, scale if last else scale.detach())
                value.backward()
        return value.detach()


def plain():
    return build_model()


def parallel(mesh):
    trainer = AccumulatingTrainer(build_model(), mesh["dp"])
    return trainer.model, trainer


def loss(model, batch):
    return contrast(*features(model, batch), model.logit_scale)


def step(built, batch):
    return built[1].training_step(batch)


generator = torch.Generator().manual_seed(957)


def pairs():
    words = torch.randint(2, EOS, (PAIRS, WORDS), generator=generator)
    lengths = torch.randint(2, WORDS, (PAIRS, 1), generator=generator)
    place = torch.arange(WORDS)
    words = words.masked_fill(place == lengths, EOS).masked_fill(place > lengths, 1)
    pixels = torch.randn(PAIRS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {"input_ids": words, "pixel_values": pixels}


batches = [pairs() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
