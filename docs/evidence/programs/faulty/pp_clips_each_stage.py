"""A pipeline whose stages clip their gradients by their own norm.

Thread: https://github.com/pytorch/torchtitan/issues/596 "Gradient norm clipping with pipeline
parallelism (PP)", 2024-10-01.
Wrong: clip_grad_norm_ sees only the stage's parameters; the norms are not added over the stages.
A right diagnosis says: gradients agree before clipping, but the gradient norm is that of one stage:
it must be summed (in squares) over pp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import titanlite


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocab=20, dim=16, num_layers=4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(num_layers)})
        self.output = nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) if self.output is not None else x


def loss_fn(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(model, batch):
    return loss_fn(model(batch["tokens"]), batch["labels"])


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)


def pipeline(mesh):
    rank, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = Transformer()
    for i in range(4):
        if i // (4 // size) != rank:
            del model.layers[str(i)]
    if rank > 0:
        model.tok_embeddings = None
    if rank < size - 1:
        model.output = None
    stage = PipelineStage(model, rank, size, torch.device("cpu"), group=mesh.get_group("pp"))
    model.schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    return model


def step(model, batch):
    losses = []
    if dist.get_rank() == 0:
        model.schedule.step(batch["tokens"])
        return None
    model.schedule.step(target=batch["labels"], losses=losses)
    return torch.stack(losses).mean()


generator = torch.Generator().manual_seed(3)
batches = [
    {name: torch.randint(20, (8, 5), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"pp": 2}, step=step, clip=clip)
    print(titanlite.compare(Transformer, pipeline, **options))
