"""Muon's part of an update: Newton-Schulz on whole matrices, each of them on one rank.

    shards of N matrices -> all-to-all -> a whole matrix on each of N ranks -> Newton-Schulz
                         <- all-to-all <-

The N ranks are those of one mesh axis that shards the matrices. If other axes shard them too, their
ranks gather the matrix and compute it together; replicas of a matrix each compute it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.modules.experts.dispatch import all_to_all
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import last_cuts, shard_of, shard_shapes, whole_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def find_matrices(
    model: nn.Module, is_hidden: Callable[[str], bool], adamw: Sequence[str]
) -> dict[str, str]:
    """The parameters of the plain model that Muon updates: canonical name -> "matrix" or "stack".

    By default these are the weights of two dimensions, and stacks of them such as those of experts,
    whose names are `is_hidden` (in a block); no biases, embeddings and convolutions. With patterns
    `adamw` they are all weights of two or three dimensions whose names match none. A weight of
    three dimensions is one matrix, flattened from its second dimension on, if its module says
    `is_one_matrix`.
    """
    found = {}
    for raw, parameter in model.named_parameters():
        owner, _, leaf = raw.rpartition(".")
        module, name = model.get_submodule(owner), canonical_name(raw)
        is_bias = leaf.endswith("bias") or isinstance(module, nn.modules.conv._ConvNd)
        if not parameter.requires_grad or parameter.ndim not in (2, 3) or is_bias:
            continue
        is_named = any(fnmatchcase(name, pattern) for pattern in adamw)
        is_left = not is_hidden(name) or isinstance(module, nn.Embedding)
        if not (is_named if adamw else is_left):
            is_one = parameter.ndim == 2 or getattr(module, "is_one_matrix", False)
            found[name] = "matrix" if is_one else "stack"
    return found


def newton_schulz(x_BMN: Tensor, steps: int) -> Tensor:
    """Matrices with the singular vectors of these, and singular values near 1, in their dtype.

    Source: https://kellerjordan.github.io/posts/muon, as in torch.optim.Muon.
    """
    is_tall = x_BMN.size(-2) > x_BMN.size(-1)
    x = x_BMN.mT if is_tall else x_BMN
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adjusted(adjust_lr_fn: str, kind: str, shape: Sequence[int]) -> float:
    """The factor on the learning rate of a matrix, by torch.optim.Muon's names."""
    rows, columns = shape[-2:] if kind == "stack" else (shape[0], math.prod(shape[1:]))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(
    parameters: Iterable[Tensor], kind: str, update_of: Callable[[Tensor], Tensor], steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, this rank's shard of its orthogonalized update), a few at a time.

    `update_of` gives this rank's shard of the update of a parameter. The parameters have one mesh,
    and every rank of it must call this for the same ones.
    """

    def compute(update: Tensor) -> Tensor:
        batched = update if kind == "stack" else update.reshape(1, update.size(0), -1)
        return newton_schulz(batched, steps).reshape(update.shape)

    by_axis: dict[int | None, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        cuts = last_cuts(parameter, _whole_dims(parameter, kind))
        largest = max(cuts, key=lambda axis: (cuts[axis], -axis), default=None)
        by_axis[largest].append(parameter)
    for axis, some in by_axis.items():
        if axis is None:
            for parameter in some:
                yield parameter, compute(update_of(parameter))
            continue
        # Ranks that have matrices of one size wait less for each other.
        some.sort(key=lambda parameter: parameter.numel())
        size = some[0].device_mesh.size(axis)  # type: ignore[attr-defined]
        for first in range(0, len(some), size):
            batch = some[first : first + size]
            updates = [update_of(parameter) for parameter in batch]
            yield from zip(batch, _exchanged(batch, updates, axis, kind, compute), strict=True)


def _whole_dims(parameter: Tensor, kind: str) -> range:
    """The dimensions that Newton-Schulz needs whole; a stack may be cut between its matrices."""
    return range(parameter.ndim)[-2:] if kind == "stack" else range(parameter.ndim)


def _exchanged(
    batch: Sequence[Tensor],
    updates: list[Tensor],
    axis: int,
    kind: str,
    compute: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """What `compute` makes of whole updates: the n-th rank of `axis` computes the n-th of them."""
    mesh = batch[0].device_mesh  # type: ignore[attr-defined]
    size, place = mesh.size(axis), mesh.get_local_rank(axis)
    name = mesh.get_group(axis).group_name
    sent = [update.numel() for update in updates] + [0] * (size - len(updates))
    received, own = [0] * size, None
    if place < len(batch):
        own = batch[place]
        assert isinstance(own, DTensor)
        dim, shapes = shard_shapes(own, axis)
        received = [math.prod(shape) for shape in shapes]
    joined = torch.cat([update.flatten() for update in updates])
    shards = all_to_all(joined, received, sent, name)
    if own is not None:
        of_ranks = zip(shards.split(received), shapes, strict=True)
        part = torch.cat([shard.view(shape) for shard, shape in of_ranks], dim)
        placements = [Replicate() if n == axis else p for n, p in enumerate(own.placements)]
        rest = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
        )
        dims = _whole_dims(own, kind)
        part = shard_of(compute(whole_tensor(rest, dims)), rest, dims)
        pieces = part.split([shape[dim] for shape in shapes], dim)
        shards = torch.cat([piece.flatten() for piece in pieces])
    back = all_to_all(shards, sent, received, name).split(sent)
    return [flat.view(update.shape) for flat, update in zip(back, updates, strict=False)]
