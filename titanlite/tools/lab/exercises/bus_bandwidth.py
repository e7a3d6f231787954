"""Note 3: the bandwidth of a measured collective, in the definition of the note."""

from titanlite.tools.lab.exercises.exercise import Exercise


def bus_bandwidth(device, kind, num_bytes, seconds):
    """Bytes per second that each rank sends, if the collective runs on a ring.

    `kind` is "all_reduce", "all_gather" or "reduce_scatter"; num_bytes are those of the whole
    tensor. W is device.mesh.size.
    """
    world_size = device.mesh.size
    times = 2 if kind == "all_reduce" else 1
    return times * (world_size - 1) / world_size * num_bytes / seconds


KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_reduce"]


EXERCISE = Exercise(
    solution=bus_bandwidth,
    hint="A reduce-scatter sends (W-1)/W of the tensor per rank. An all-reduce is two of these.",
    inputs=lambda rank: (KINDS[rank], 1 << 20, 0.5),
    expected=lambda inputs: [1.5 * 2**21, 0.75 * 2**21, 0.75 * 2**21, 1.5 * 2**21],
)
