"""Fine-tuning of a decoder whose large output head lives on the first rank only, while the layers below are data parallel.

Might be accused because: the ranks take two and six of the eight rows, only the first rank has a head, a loss and a gradient of
the head, the second rank's backward pass starts from a received tensor, and the gradients are summed and not averaged.
Correct because: the first rank computes the mean over the answer tokens of all rows from the features it receives and returns
the gradient of each rank's features, so the ranks' gradients of the lower layers are parts of one gradient and belong summed.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, IGNORE = 30, 12, 3, 8, 2, -100
SHARES = 2, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.trunk(tokens))


def answer_loss(logits, labels):
    return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE)


class Worker:
    """All ranks run the trunk; the first one also serves the head."""

    def __init__(self, model, group):
        self.model, self.group, self.rank = model, group, dist.get_rank(group)
        self.peers = [dist.get_global_rank(group, i) for i in range(len(SHARES))]
        if self.rank > 0:
            del model.head

    def exchange_with_head(self, features):
        dist.send(features.contiguous(), self.peers[0], group=self.group)
        grad = torch.empty_like(features)
        dist.recv(grad, self.peers[0], group=self.group)
        return grad, torch.zeros(())

    def serve_head(self, features, labels):
        parts = [features]
        for rank in range(1, len(SHARES)):
            part = features.new_empty(SHARES[rank], *features.shape[1:])
            dist.recv(part, self.peers[rank], group=self.group)
            parts.append(part)
        features = torch.cat(parts).requires_grad_()
        value = answer_loss(self.model.head(features), labels)
        value.backward()
        own, *others = features.grad.split(SHARES)
        for rank, grad in enumerate(others, 1):
            dist.send(grad.contiguous(), self.peers[rank], group=self.group)
        return own, value.detach()

    def train(self, tokens, labels):
        features = self.model.trunk(tokens.split(SHARES)[self.rank])
        if self.rank == 0:
            grad, value = self.serve_head(features.detach(), labels)
        else:
            grad, value = self.exchange_with_head(features.detach())
        features.backward(grad)
        for parameter in self.model.trunk.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
        dist.all_reduce(value, group=self.group)
        return value


def plain():
    return Decoder()


def parallel(mesh):
    model = Decoder()
    return model, Worker(model, mesh.get_group("dp"))


def loss(model, batch):
    tokens, labels = batch
    return answer_loss(model(tokens), labels)


def step(built, batch):
    return built[1].train(*batch)


generator = torch.Generator().manual_seed(222)


def conversations():
    text = torch.randint(0, VOCAB, (sum(SHARES), LENGTH + 1), generator=generator)
    prompts = torch.randint(1, LENGTH, (sum(SHARES), 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, IGNORE)
    return text[:, :-1].contiguous(), labels


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
