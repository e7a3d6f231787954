"""A DDP model whose methods are called on `.module`.

Thread: https://github.com/k2-fsa/icefall/issues/226 "[BUG] Possible issue with DDP and asr decoder
gradient syncing", 2022-02-25.
Wrong: encoder and decoder run through `model.module.<method>`, so DDP's forward never runs and its
backward never all-reduces. Each rank trains on its own part of the batch.
A right diagnosis says: no gradient is averaged over dp; every rank has the gradient of its own part
of the batch only (DDP's forward is bypassed).
"""

import torch
from torch import nn
from torch.nn.functional import ctc_loss, log_softmax
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class Transducer(nn.Module):
    def __init__(self, num_features=10, dim=16, num_tokens=9):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_features, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.decoder = nn.Linear(dim, num_tokens)

    def forward_encoder(self, features):
        return self.encoder(features)

    def forward_decoder(self, encoded):
        return log_softmax(self.decoder(encoded), -1)


def criterion(log_probs, targets):
    batch, frames = log_probs.shape[:2]
    lengths = torch.full((batch,), frames)
    target_lengths = torch.full((batch,), targets.shape[1])
    return ctc_loss(log_probs.transpose(0, 1), targets, lengths, target_lengths)


def plain_loss(model, batch):
    return criterion(model.forward_decoder(model.forward_encoder(batch["x"])), batch["y"])


def train_one_batch(model, batch):
    encoded = model.module.forward_encoder(batch["x"])
    log_probs = model.module.forward_decoder(encoded)
    loss = criterion(log_probs, batch["y"])
    loss.backward()
    return loss


def build():
    return DDP(Transducer())


generator = torch.Generator().manual_seed(1)
batches = [
    {
        "x": torch.randn(4, 12, 10, generator=generator),
        "y": torch.randint(1, 9, (4, 4), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Transducer,
            build,
            batches=batches,
            loss=plain_loss,
            ranks={"dp": 2},
            split="dp",
            step=train_one_batch,
        )
    )
