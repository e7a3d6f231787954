"""Two streaming datasets are split by rank and interleaved then: the interleaved stream forgets the split.

Thread: https://github.com/huggingface/datasets/issues/7868 "Data duplication with `split_dataset_by_node` and
`interleaved_dataset`", 2025-11-17.
Wrong: interleave makes a new stream from the rows of its sources, without their (rank, world_size). All ranks train
on the first half of the batch, and nobody reads the other half.
EXPECT: rank 1 reads the wrong rows: its inputs (the tokens that enter embed) are those of rank 0, not its part of the
batch; half of the rows are never read. The loss and all gradients differ from step 1 on, and they agree with a plain
model on rank 0's rows alone.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LENGTH = 14, 10, 6


class Stream:
    def __init__(self, rows, rank=0, world_size=1):
        self.rows, self.rank, self.world_size = rows, rank, world_size

    def split_by_node(self, rank, world_size):
        return Stream(self.rows, rank, world_size)

    def take(self, count):
        return torch.stack(self.rows[self.rank :: self.world_size][:count])


def interleave(streams):
    return Stream([row for rows in zip(*(stream.rows for stream in streams)) for row in rows])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.rnn, self.head = nn.LSTM(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.rnn(self.embed(tokens))[0]))


def loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parallel(mesh):
    return fully_shard(LM(), mesh=mesh["dp"])


def load(batch, mesh):
    rank, world_size = mesh.get_local_rank("dp"), mesh["dp"].size()
    text, code = batch["tokens"].chunk(2)
    text = Stream(list(text)).split_by_node(rank, world_size)
    code = Stream(list(code)).split_by_node(rank, world_size)
    return {"tokens": interleave([text, code]).take(len(batch["tokens"]) // world_size)}


generator = torch.Generator().manual_seed(7868)
batches = [{"tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator)} for _ in range(3)]
arguments = LM, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=load)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
