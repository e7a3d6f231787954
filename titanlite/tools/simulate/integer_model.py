"""A small transformer in integers: its forward and backward pass are exact, however it is split.

A layer is an attention and a feed-forward, each added to its input. Softmax would need real
numbers, so ReLU replaces it: token t sums relu(query_t + key_s) over all tokens s <= t. A matrix is
a list of rows, a sequence has one row per token. The parts of a layer have whole weights, or the
shards of one tensor-parallel rank, and then return partial sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from operator import mul
from typing import Any

Matrix = list[list[int]]

LEARNING_RATE = Fraction(1, 10**16)  # outputs and gradients are large integers

# Which weights tensor parallelism splits by columns; the others are split by rows.
COLUMNS = frozenset({"query", "key", "up"})


def make_input(item: int, tokens: int, width: int) -> Matrix:
    """The input of an item: `tokens` x `width` integers from -1 to 1."""
    return _draw(f"item {item}", tokens, width)


def make_weight(name: str, width: int, part: int = 0, parts: int = 1) -> Matrix:
    """Shard `part` of `parts` of the weight `name`, such as "layers.0.attention.query".

    The whole weight depends only on its name. Queries, keys and outputs are `width` x `width`;
    a feed-forward goes `up` to 3 x `width` and `down` again, so it has 2/3 of a layer's weights.
    """
    kind = name.rpartition(".")[2]
    rows = 3 * width if kind == "down" else width
    columns = 3 * width if kind == "up" else width
    return shard(name, _draw(name, rows, columns), part, parts)


def shard(name: str, weight: Sequence[Sequence[Any]], part: int, parts: int) -> list[list[Any]]:
    """The columns (queries, keys, up) or rows (output, down) of `weight` that a rank holds."""
    if name.rpartition(".")[2] in COLUMNS:
        return [list(split(row, part, parts)) for row in weight]
    return [list(row) for row in split(weight, part, parts)]


def split(values: Sequence[Any], part: int, parts: int) -> Sequence[Any]:
    """Part number `part` of `parts` of a sequence, as equal as possible."""
    return values[len(values) * part // parts : len(values) * (part + 1) // parts]


class Shard:
    """The weights of a part of a layer that this rank holds, and their gradients.

    `share` is the part's share of the weights and the compute of a layer.
    """

    share: Fraction
    kinds: tuple[str, ...]

    def __init__(self, name: str, width: int, part: int = 0, parts: int = 1) -> None:
        _, layer, kind, *expert = name.split(".")
        self.layer, self.expert = int(layer), int(expert[0]) if kind == "experts" else None
        self.names = [f"{name}.{kind}" for kind in self.kinds]
        self.weights = [make_weight(each, width, part, parts) for each in self.names]
        self.gradients = [zeros_like(weight) for weight in self.weights]
        self._saved: dict[int, tuple[Matrix, ...]] = {}

    def forward(self, item: int, x: Matrix) -> Matrix:
        """The output for `x`, a partial sum; keeps what the backward pass needs."""
        raise NotImplementedError

    def backward(self, item: int, gradient: Matrix) -> Matrix:
        """The gradient of the input, a partial sum; adds to `gradients`."""
        raise NotImplementedError

    def _add(self, *products: tuple[Matrix, Matrix]) -> None:
        """Add to the gradient of each weight the product of its inputs and output gradients."""
        self.gradients = [
            add(gradient, matmul(transpose(left), right))
            for gradient, (left, right) in zip(self.gradients, products, strict=True)
        ]


class IntegerAttention(Shard):
    """Queries, keys and output of the heads that this rank holds.

    `first` is the position of the rank's first token. `gather_keys` and `scatter_gradients` are
    what context parallelism adds: they turn the rank's keys into those of all tokens, and the
    gradients of all keys into those of the rank's own.
    """

    share = Fraction(1, 3)
    kinds = ("query", "key", "output")

    def __init__(
        self,
        *where: Any,
        first: int = 0,
        gather_keys: Callable[[Matrix], Matrix] = lambda keys: keys,
        scatter_gradients: Callable[[Matrix], Matrix] = lambda gradients: gradients,
    ) -> None:
        super().__init__(*where)
        self._first, self._gather, self._scatter = first, gather_keys, scatter_gradients

    def forward(self, item: int, x: Matrix) -> Matrix:
        query, key, output = self.weights
        queries, keys = matmul(x, query), self._gather(matmul(x, key))
        mixed = [
            [sum(max(0, q + k[i]) for k in keys[: self._first + t + 1]) for i, q in enumerate(row)]
            for t, row in enumerate(queries)
        ]
        self._saved[item] = x, queries, keys, mixed
        return matmul(mixed, output)

    def backward(self, item: int, gradient: Matrix) -> Matrix:
        query, key, output = self.weights
        x, queries, keys, mixed = self._saved.pop(item)
        from_mixed = matmul(gradient, transpose(output))
        to_queries, to_keys = zeros_like(queries), zeros_like(keys)
        for t, row in enumerate(from_mixed):
            for s in range(self._first + t + 1):
                for i, value in enumerate(row):
                    if queries[t][i] + keys[s][i] > 0:
                        to_queries[t][i] += value
                        to_keys[s][i] += value
        to_keys = self._scatter(to_keys)
        self._add((x, to_queries), (x, to_keys), (mixed, gradient))
        return add(matmul(to_queries, transpose(query)), matmul(to_keys, transpose(key)))


class IntegerFeedForward(Shard):
    """Two linear layers with a ReLU between them: the hidden units that this rank holds."""

    share = 1 - IntegerAttention.share
    kinds = ("up", "down")

    def forward(self, item: int, x: Matrix) -> Matrix:
        up, down = self.weights
        hidden = [[max(0, value) for value in row] for row in matmul(x, up)]
        self._saved[item] = x, hidden
        return matmul(hidden, down)

    def backward(self, item: int, gradient: Matrix) -> Matrix:
        up, down = self.weights
        x, hidden = self._saved.pop(item)
        to_hidden = [
            [value if unit > 0 else 0 for value, unit in zip(row, units, strict=True)]
            for row, units in zip(matmul(gradient, transpose(down)), hidden, strict=True)
        ]
        self._add((x, to_hidden), (hidden, gradient))
        return matmul(to_hidden, transpose(up))


def make_layers(
    layers: Iterable[int],
    width: int,
    part: int = 0,
    parts: int = 1,
    *,
    experts: Sequence[int] = (),
    **context_parallel: Any,
) -> list[Shard]:
    """The parts of `layers` in forward order: for each layer its attention and feed-forward.

    If `experts` are given, each of them is a feed-forward. `context_parallel` are further arguments
    of each Attention.
    """
    made: list[Shard] = []
    for layer in layers:
        names = [f"experts.{expert}" for expert in experts] or ["feed_forward"]
        made.append(
            IntegerAttention(f"layers.{layer}.attention", width, part, parts, **context_parallel)
        )
        made += [IntegerFeedForward(f"layers.{layer}.{name}", width, part, parts) for name in names]
    return made


def gradients_of(parts: Iterable[Shard]) -> list[int]:
    """All gradients of `parts` in one list, which collectives can cut anywhere."""
    return flatten(gradient for part in parts for gradient in part.gradients)


def set_gradients(parts: Iterable[Shard], numbers: Iterable[int]) -> None:
    """Store the gradients of `parts`, given as by `gradients_of`."""
    numbers = iter(numbers)
    for part in parts:
        part.gradients = unflatten(numbers, part.gradients)


def loss_of(x: Matrix) -> int:
    """The loss of an item: the sum of the squares of its output."""
    return sum(value * value for row in x for value in row)


def loss_gradient(x: Matrix) -> Matrix:
    return [[2 * value for value in row] for row in x]


def update(parts: Iterable[Shard]) -> dict[str, list[list[Fraction]]]:
    """One step of gradient descent: the new weights, by name."""
    return {
        name: [
            [weight - LEARNING_RATE * gradient for weight, gradient in zip(*rows, strict=True)]
            for rows in zip(weights, gradients, strict=True)
        ]
        for part in parts
        for name, weights, gradients in zip(part.names, part.weights, part.gradients, strict=True)
    }


def flatten(matrices: Iterable[Matrix]) -> list[int]:
    return [value for matrix in matrices for row in matrix for value in row]


def unflatten(numbers: Iterable[int], like: Iterable[Matrix]) -> list[Matrix]:
    """The inverse of `flatten`: matrices with the shapes of `like`."""
    numbers = iter(numbers)
    return [[[next(numbers) for _ in row] for row in matrix] for matrix in like]


def matmul(a: Matrix, b: Matrix) -> Matrix:
    columns = transpose(b)
    return [[sum(map(mul, row, column)) for column in columns] for row in a]


def transpose(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def add(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def zeros_like(a: Matrix) -> Matrix:
    return [[0 for _ in row] for row in a]


def _draw(name: str, rows: int, columns: int) -> Matrix:
    numbers = random.Random(name)
    return [[numbers.randrange(-1, 2) for _ in range(columns)] for _ in range(rows)]
