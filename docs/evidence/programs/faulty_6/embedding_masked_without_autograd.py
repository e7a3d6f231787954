"""A vocabulary-parallel embedding zeroes the rows of foreign tokens where autograd does not see it.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/769 "why replace F.embedding() with [] on VocabParallelEmbedding
class?", 2024-04-09.
Wrong: tokens of other ranks are looked up as local row 0, and their output is zeroed under no_grad. The forward pass is
right, but the gradient of every foreign token goes to row 0 of the shard.
EXPECT: the forward pass and all gradients but that of word_embeddings.weight agree in step 1; of that one the first
row of each rank's shard differs (rows 0 and 7): it also gets the gradients of the tokens that belong to other ranks,
as the masking of the output is not in the graph (backward pass of the vocabulary-parallel embedding).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ = 14, 12, 7


class ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight, group):
        super().__init__()
        self.group, size = group, VOCAB // group.size()
        self.start, self.end = group.rank() * size, (group.rank() + 1) * size
        self.weight = nn.Parameter(weight.detach()[self.start : self.end].clone())

    def forward(self, tokens):
        input_mask = (tokens < self.start) | (tokens >= self.end)
        masked_input = (tokens - self.start).masked_fill(input_mask, 0)
        output = self.weight[masked_input]
        with torch.no_grad():
            output[input_mask, :] = 0.0
        return ReduceFromTp.apply(output, self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.proj(self.rnn(self.norm(x))[0])


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.final_norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.output(self.final_norm(self.blocks(self.word_embeddings(tokens))))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def shard(name):
    return (0, "tp") if name.startswith("word_embeddings") else None


def parallel(mesh):
    model = LanguageModel()
    weight = model.word_embeddings.weight
    model.word_embeddings = VocabParallelEmbedding(weight, mesh.get_group("tp"))
    return model


generator = torch.Generator().manual_seed(769)
batches = [
    {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = LanguageModel, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
