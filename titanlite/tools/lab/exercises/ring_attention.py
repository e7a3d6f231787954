"""Note 11: attention to keys and values that go around a ring."""

import torch
import torch.nn.functional as F

from titanlite.tools.lab.exercises.exercise import Exercise


def ring_attention(device, q, k, v):
    """softmax(q k^T / sqrt(E)) v over the keys and values of all ranks, without a mask.

    q, k and v are this rank's tokens, (n, E) each. Queries stay; send keys and values around the
    ring together, as one tensor, so that a rank never holds more than two blocks of them.
    device.group() has size and shift(tensor): send to the next rank while receiving from the
    previous one.
    """
    group = device.group()
    kv = torch.stack([k, v])
    out = torch.zeros_like(q)
    lse = torch.full((q.size(0), 1), -torch.inf, dtype=q.dtype)
    for step in range(group.size):
        if step > 0:
            kv = group.shift(kv)
        scores = q @ kv[0].T / q.size(1) ** 0.5
        block = scores.logsumexp(1, keepdim=True)
        total = torch.logaddexp(lse, block)
        out = out * (lse - total).exp() + (scores - total).exp() @ kv[1]
        lse = total
    return out


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(3, 3, 4, dtype=torch.float64, generator=generator) * 3)


def expected(inputs):
    q, k, v = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].chunk(len(inputs))


EXERCISE = Exercise(
    solution=ring_attention,
    hint="Keep the output and the log-sum-exp of the scores so far. Their denominators are "
    "exp(lse); the common one is their sum, so rescale what you have by exp(lse - total).",
    inputs=inputs,
    expected=expected,
    forbidden=("all_gather", "gather", "broadcast", "all_scatter", "all_to_all"),
    points=5,
)
