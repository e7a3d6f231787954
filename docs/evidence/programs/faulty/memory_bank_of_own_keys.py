"""A momentum-contrast memory bank that every rank fills with its own keys only.

Thread: https://github.com/lightly-ai/lightly/issues/1018 "MemoryBankModule - no distributed all
gather prior to queueing a batch", 2022-12-22.
Wrong: the keys are not gathered before they are put into the queue. The queue advances half as fast,
and DDP overwrites it with rank 0's.
A right diagnosis says: the buffer queue (and queue_ptr) differs from step 1 on although loss and
gradients of step 1 agree: it holds the keys of one rank's part of the batch.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

SIZE, DIM, TEMPERATURE = 32, 8, 0.2


def make_encoder():
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, DIM))


class MoCo(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.encoder_q, self.encoder_k = make_encoder(), make_encoder()
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(SIZE, DIM), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.mul_(self.momentum).add_(q, alpha=1 - self.momentum)

    @torch.no_grad()
    def dequeue_and_enqueue(self, keys):
        pointer = int(self.queue_ptr)
        self.queue[pointer : pointer + len(keys)] = keys
        self.queue_ptr[0] = (pointer + len(keys)) % SIZE

    def forward(self, im_q, im_k):
        q = normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = normalize(self.encoder_k(im_k), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().t()
        self.dequeue_and_enqueue(k)
        return torch.cat([positive, negative], 1) / TEMPERATURE


def loss(model, batch):
    logits = model(batch["im_q"], batch["im_k"])
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def build():
    return DDP(MoCo())


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randn(8, 12, generator=generator) for name in ("im_q", "im_k")} for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(MoCo, build, **options))
