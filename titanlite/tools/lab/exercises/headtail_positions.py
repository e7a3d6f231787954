"""Note 11: which tokens a rank holds, for equal work under a causal mask."""

from titanlite.tools.lab.exercises.exercise import Exercise


def headtail_positions(device, num_tokens):
    """The positions of this rank's tokens, ascending, so that all ranks have equal causal work.

    The sequence has 2 W equal chunks, and every rank holds two of them; rank 0 holds the first.
    A query in chunk c attends to c + 1 chunks, its own included.
    """
    rank, world_size = device.rank, device.mesh.size
    size = num_tokens // (2 * world_size)
    chunks = rank, 2 * world_size - 1 - rank
    return [chunk * size + i for chunk in chunks for i in range(size)]


def expected(inputs):
    return [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


EXERCISE = Exercise(
    solution=headtail_positions,
    hint="The chunks c and d of a rank take (c + 1) + (d + 1) pairs. Which d makes this sum the "
    "same for c = 0, 1, 2, ...?",
    inputs=lambda rank: (16,),
    expected=expected,
)
