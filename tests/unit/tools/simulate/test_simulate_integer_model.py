"""The integer model: its gradients are exact derivatives, and its shards make up the whole."""

import random
from fractions import Fraction

import pytest

from titanlite.tools.simulate.integer_model import (
    LEARNING_RATE,
    IntegerAttention,
    add,
    flatten,
    gradients_of,
    loss_gradient,
    loss_of,
    make_input,
    make_layers,
    make_weight,
    set_gradients,
    shard,
    split,
    unflatten,
    update,
)

TOKENS, WIDTH, ITEMS = 3, 4, 2


def run(model, backward=False):
    """The loss of ITEMS items; with `backward`, the gradients are left in `model`."""
    loss = 0
    for item in range(ITEMS):
        x = make_input(item, TOKENS, WIDTH)
        for part in model:
            x = add(x, part.forward(item, x))
        loss += loss_of(x)
        gradient = loss_gradient(x)
        for part in reversed(model):
            gradient = add(gradient, part.backward(item, gradient))
    return loss


def test_gradients_are_the_derivatives_of_the_loss():
    """The loss is piecewise quadratic in a single weight: a small central difference is exact.

    At a kink of ReLU it would be the mean of both sides; these weights are not at one.
    """
    model = make_layers(range(2), WIDTH)
    numbers = random.Random(0)
    for part in model:
        part.weights = [
            [[numbers.randrange(-99, 100) for _ in row] for row in weight]
            for weight in part.weights
        ]
    run(model)
    step = Fraction(1, 10**9)
    checked = 0
    for part in model:
        for weight, gradient in zip(part.weights, part.gradients, strict=True):
            for _ in range(2):
                i, j = numbers.randrange(len(weight)), numbers.randrange(len(weight[0]))
                expected, before = gradient[i][j], weight[i][j]
                losses = []
                for sign in (1, -1):
                    weight[i][j] = before + sign * step
                    copies = make_layers(range(2), WIDTH)
                    for copy, own in zip(copies, model, strict=True):
                        copy.weights = own.weights
                    losses.append(run(copies))
                weight[i][j] = before
                assert (losses[0] - losses[1]) / (2 * step) == expected
                checked += expected != 0
    assert checked > 10


def test_a_token_attends_to_no_later_one():
    attention = IntegerAttention("layers.0.attention", WIDTH)
    x = make_input(5, TOKENS, WIDTH)
    before = attention.forward(0, x)
    after = attention.forward(1, [*x[:-1], [9] * WIDTH])
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_shards_of_layers_are_partial_sums(parts):
    x = make_input(0, TOKENS, WIDTH)
    whole = make_layers([0], WIDTH)
    shards = [make_layers([0], WIDTH, part, parts) for part in range(parts)]
    for number, part in enumerate(whole):
        outputs = [model[number].forward(0, x) for model in shards]
        total = outputs[0]
        for output in outputs[1:]:
            total = add(total, output)
        assert total == part.forward(0, x)


@pytest.mark.parametrize("kind", ["query", "key", "output", "up", "down"])
def test_shards_make_up_the_weight(kind):
    name = f"layers.1.{kind}"
    whole = make_weight(name, WIDTH)
    shards = [make_weight(name, WIDTH, part, 4) for part in range(4)]
    assert shards == [shard(name, whole, part, 4) for part in range(4)]
    if kind in ("query", "key", "up"):
        rows = [[x for part in shards for x in part[i]] for i in range(len(whole))]
    else:
        rows = [row for part in shards for row in part]
    assert rows == whole


def test_a_step_lowers_the_loss():
    model = make_layers(range(4), 4)
    before = run(model)
    for part in model:
        part.weights = [update([part])[name] for name in part.names]
    assert 0 < run(model) < before


def test_update_subtracts_the_gradient():
    model = make_layers([0], WIDTH)
    run(model)
    new = update(model)
    part = model[0]
    assert (
        new[part.names[0]][1][2] == part.weights[0][1][2] - LEARNING_RATE * part.gradients[0][1][2]
    )


def test_gradients_are_set_as_they_are_listed():
    model = make_layers(range(2), WIDTH, experts=[1, 3])
    assert [part.expert for part in model] == [None, 1, 3] * 2
    assert [part.layer for part in model] == [0] * 3 + [1] * 3
    numbers = list(range(len(gradients_of(model))))
    set_gradients(model, numbers)
    assert gradients_of(model) == numbers


def test_flatten_and_split():
    matrices = [[[1, 2], [3, 4]], [[5]]]
    assert unflatten(flatten(matrices), matrices) == matrices
    assert [list(split(range(5), part, 3)) for part in range(3)] == [[0], [1, 2], [3, 4]]
