"""The integer model: its gradients are exact derivatives, and its shards make up the whole."""

import random
from fractions import Fraction

from titanlite.tools.simulate.integer_model import (
    IntegerAttention,
    add,
    loss_gradient,
    loss_of,
    make_input,
    make_layers,
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


def test_a_step_lowers_the_loss():
    model = make_layers(range(4), 4)
    before = run(model)
    for part in model:
        part.weights = [update([part])[name] for name in part.names]
    assert 0 < run(model) < before
