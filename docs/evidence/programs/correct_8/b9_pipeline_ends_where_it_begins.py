"""A pipeline whose last piece is on the first rank again: embedding and tied head are one weight, and nothing is reduced.

Thread: of the kind AI-Hypercomputer/maxtext pull request #691 "Pipeline parallelism" (2024: circular pipelines) and
NVIDIA/Megatron-LM issue #299 "what it's for _EMBEDDING_GROUP?" (2023: why the tied embedding is on two stages).
Correct: rank 0 has the embedding, the first blocks, and then the final norm and the head, which is the embedding's weight;
rank 1 has the blocks between. The hidden states go to rank 1 and back, and so do the gradients. Rank 0 has the loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS, LENGTH, LAYERS, MICROBATCHES = 16, 8, 2, 6, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.LayerNorm(DIM)

    def begin(self, tokens):
        return self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))

    def body(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x

    def end(self, x):
        return linear(self.norm(x), self.embed.weight)

    def forward(self, tokens):
        return self.end(self.body(self.begin(tokens)))


def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return mean(model(batch["tokens"]), batch["targets"])


def parallel(mesh):
    model, rank = GPT(), mesh.get_local_rank("pp")
    for i in range(LAYERS):
        if (i * 2 // LAYERS == 0) != (rank == 0):
            del model.blocks[str(i)]
    if rank == 1:
        del model.embed, model.positions, model.norm
    return model


def receive(tokens, dtype):
    x = torch.empty(*tokens.shape, DIM, dtype=dtype)
    dist.recv(x, 1 - dist.get_rank())
    return x.requires_grad_()


def first_rank(model, microbatches):
    dtype, sent, total = model.norm.weight.dtype, [], 0.0
    for tokens, _ in microbatches:
        sent.append(model.body(model.begin(tokens)))
        dist.send(sent[-1].detach().contiguous(), 1)
    for x, (tokens, targets) in zip(sent, microbatches):
        back = receive(tokens, dtype)
        value = mean(model.end(back), targets) / len(microbatches)
        value.backward()
        dist.send(back.grad, 1)
        total = total + value.detach()
        x.backward(receive(tokens, dtype).detach())
    return total


def second_rank(model, microbatches):
    dtype = next(model.parameters()).dtype
    inputs = [receive(tokens, dtype) for tokens, _ in microbatches]
    for x, (tokens, _) in zip(inputs, microbatches):
        y = model.body(x)
        dist.send(y.detach().contiguous(), 0)
        y.backward(receive(tokens, dtype).detach())
        dist.send(x.grad, 0)


def step(model, batch):
    microbatches = list(
        zip(batch["tokens"].chunk(MICROBATCHES), batch["targets"].chunk(MICROBATCHES))
    )
    return (first_rank if dist.get_rank() == 0 else second_rank)(model, microbatches)


generator = torch.Generator().manual_seed(135)


def draw():
    return torch.randint(VOCAB, (6, LENGTH), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
