"""A looped (universal) transformer: the same two blocks are applied three times, as a pipeline in a circle of two
ranks.

Thread: AI-Hypercomputer/maxtext pull request #701 "Circular Pipelining" (2024): the last stage sends to the first
again, as many times as there are repeats; here the repeats share the weights.
Correct: one could expect the gradient of a shared weight to be reduced between stages, or divided by the number of
rounds. But a block lives on one rank only, whose three uses of it add up in .grad by themselves; embedding, round
vectors and tied head are on rank 0, where a microbatch comes home after each round to be read. A home tensor has two
consumers, its own head and the next round; each runs a backward pass down to this leaf, whose .grad has both sums
before it is sent. Microbatches are unequal; losses are sums, divided by the number of targets in the whole batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, LENGTH, ROWS, ROUNDS, MICRO = 17, 12, 2, 8, 7, 3, 3
WEIGHTS = [0.2, 0.3, 0.5]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rounds = nn.Embedding(WORDS, WIDTH), nn.Embedding(ROUNDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def read(self, x, targets, index):
        logits = F.linear(self.norm(x), self.words.weight).flatten(0, 1)
        return WEIGHTS[index] * F.cross_entropy(logits, targets.flatten(), reduction="sum")


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.ends, self.blocks = Ends(), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.ends = whole.ends if index == 0 else None
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index]})

    def forward(self, x):
        return next(iter(self.blocks.values()))(x)


class Circle:
    def __init__(self, stage, group):
        self.stage, self.index = stage, dist.get_rank(group)
        self.group, self.other = group, dist.get_global_rank(group, 1 - self.index)

    def send(self, x):
        x = x.detach().contiguous()
        self.sent.append((dist.isend(x, self.other, group=self.group), x))

    def receive(self, rows):
        x = torch.empty(rows, LENGTH, WIDTH)
        dist.recv(x, self.other, group=self.group)
        return x.requires_grad_()

    def first(self, words, targets, count):
        ends, rows = self.stage.ends, [len(part) for part in words]
        home, out, total = {}, {}, 0.0
        for i in range(ROUNDS):
            for m, part in enumerate(words):
                x = home[i - 1, m] if i else ends.words(part)
                out[i, m] = self.stage(x + ends.rounds.weight[i])
                self.send(out[i, m])
            for m in range(MICRO):
                home[i, m] = self.receive(rows[m])
                value = ends.read(home[i, m], targets[m], i) / count
                value.backward()
                total = total + value.detach()
        for i, m in reversed(out):
            self.send(home[i, m].grad)
            out[i, m].backward(self.receive(rows[m]))
        return total

    def last(self, words):
        runs = []
        for part in words * ROUNDS:
            x = self.receive(len(part))
            runs.append((x, self.stage(x)))
            self.send(runs[-1][1])
        for x, y in reversed(runs):
            y.backward(self.receive(len(x)))
            self.send(x.grad)

    def __call__(self, words, targets):
        self.sent, count = [], (targets >= 0).sum()
        words, targets = words.tensor_split(MICRO), targets.tensor_split(MICRO)
        total = self.last(words) if self.index else self.first(words, targets, count)
        for handle, _ in self.sent:
            handle.wait()
        return total


def loss(model, batch):
    words, targets = batch
    x, total = model.ends.words(words), 0.0
    for i in range(ROUNDS):
        x = model(x + model.ends.rounds.weight[i])
        total = total + model.ends.read(x, targets, i)
    return total / (targets >= 0).sum()


def parallel(mesh):
    stage = Stage(Looped(), mesh.get_local_rank("pp"))
    return stage, Circle(stage, mesh.get_group("pp"))


def texts(seed):
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return words[:, :-1], words[:, 1:].masked_fill(words[:, :-1] % 4 == 1, -100)


batches = [texts(seed) for seed in (701, 677, 691)]

arguments = Looped, parallel
options = dict(
    batches=batches, loss=loss, step=lambda built, batch: built[1](*batch), ranks={"pp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
