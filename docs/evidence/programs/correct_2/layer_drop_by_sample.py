"""LayerDrop whose dropped layers come with the batch, so that ranks skip different layers.

Thread: https://github.com/facebookresearch/fairseq/issues/2389 "LayerDrop multiple GPU command"
(--find-unused-parameters), 2020-07-28.
Right: a layer that no sample of the rank uses is not called there; DDP averages its gradient with zero.
Must not be accused: a module that does not run on one rank, or a parameter without a gradient there.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

LAYERS = 3


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.norm(x))))


class TransformerEncoder(nn.Module):
    def __init__(self, vocab=17, dim=10):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(LAYERS))
        self.output_projection = nn.Linear(dim, vocab)

    def forward(self, tokens, keep):
        x = self.embed_tokens(tokens)
        for layer, kept in zip(self.layers, keep.unbind(1)):
            if kept.any():
                x = x + kept[:, None, None] * layer(x)
        return self.output_projection(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["keep"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def build():
    return DistributedDataParallel(TransformerEncoder(), find_unused_parameters=True)


KEEP = [
    [[1, 0, 1], [1, 0, 0], [0, 1, 1], [1, 1, 1]],
    [[1, 1, 0], [1, 1, 0], [0, 1, 1], [0, 1, 1]],
    [[0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 0, 0]],
]
generator = torch.Generator().manual_seed(238)
batches = [
    {
        "tokens": torch.randint(17, (4, 5), generator=generator),
        "targets": torch.randint(17, (4, 5), generator=generator),
        "keep": torch.tensor(keep),
    }
    for keep in KEEP
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(TransformerEncoder, build, **options))
