"""A neural recommender of tracks for playlists, trained with DDP on triplets of a playlist, a track in it and tracks not in it.

Thread: stanford-futuredata/ColBERT issue #403 "Incorrect Data Selected with Multi-NODE DDP Training" (2025): the division of the
training triples takes every nranks-th one but starts at zero for each rank, so all processes train on the same ones.
Fault: Triplets.share steps through the list by the number of ranks but begins with the first triplet on every rank; all ranks
train on the same fourth of the triplets and nobody sees the others.
REPAIR: `picked = torch.arange(0, len(self), ranks)` -> `picked = torch.arange(rank, len(self), ranks)`
A right first sentence says: every rank takes the same rows of the batch (0, 4, 8, ...) because the selection doesn't start at
the rank's own index, so the other rows are never trained on; loss and gradients are those of one fourth of the batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

PLAYLISTS, TRACKS, ARTISTS, DIM, NEGATIVES, ROWS = 10, 20, 6, 6, 3, 16


class Triplets:
    """Rows of a playlist, its track, and NEGATIVES tracks that aren't in it."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def share(self, rank, ranks):
        picked = torch.arange(0, len(self), ranks)
        return Triplets(self.rows[picked])

    def columns(self):
        return self.rows[:, 0], self.rows[:, 1], self.rows[:, 2:]


class NeuralRecommender(nn.Module):
    """Adds a product of factors and a network's score, as neural collaborative filtering does."""

    def __init__(self):
        super().__init__()
        self.playlists, self.tracks = nn.Embedding(PLAYLISTS, DIM), nn.Embedding(TRACKS, DIM)
        self.artists, self.popularity = nn.Embedding(ARTISTS, DIM), nn.Embedding(TRACKS, 1)
        self.tower = nn.Sequential(nn.Linear(3 * DIM, 16), nn.GELU(), nn.Linear(16, 1, False))
        self.register_buffer("artist_of", torch.arange(TRACKS) * 7 % ARTISTS)

    def score(self, playlist, tracks):
        user = self.playlists(playlist).unsqueeze(1).expand(-1, tracks.size(1), -1)
        item, artist = self.tracks(tracks), self.artists(self.artist_of[tracks])
        deep = self.tower(torch.cat([user, item, artist], dim=-1)).squeeze(-1)
        return (user * item).sum(-1) + deep + self.popularity(tracks).squeeze(-1)

    def forward(self, playlist, track, negatives):
        return self.score(playlist, torch.cat([track.unsqueeze(1), negatives], dim=1))


def ranking_loss(scores):
    """Bayesian personalized ranking: the first column should be above all others."""
    return -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()


class Trainer:
    def __init__(self, model, mesh):
        self.model, self.rank, self.ranks = model, mesh.get_rank(), mesh.size()

    def train_on(self, triplets):
        own = triplets.share(self.rank, self.ranks)
        value = ranking_loss(self.model(*own.columns()))
        value.backward()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        return mean / self.ranks


def plain():
    return NeuralRecommender()


def parallel(mesh):
    model = DistributedDataParallel(NeuralRecommender())
    return model, Trainer(model, mesh)


def loss(model, batch):
    return ranking_loss(model(*Triplets(batch).columns()))


def step(built, batch):
    return built[1].train_on(Triplets(batch))


generator = torch.Generator().manual_seed(403)


def listened():
    playlists = torch.randint(0, PLAYLISTS, (ROWS, 1), generator=generator)
    tracks = (2 * playlists + torch.randint(0, 2, (ROWS, 1), generator=generator)) % TRACKS
    others = tracks + torch.randint(2, TRACKS - 2, (ROWS, NEGATIVES), generator=generator)
    return torch.cat([playlists, tracks, others % TRACKS], dim=1)


batches = [listened() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"dp": 4},
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))
