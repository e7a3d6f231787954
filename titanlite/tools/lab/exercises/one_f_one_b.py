"""Note 6: the order of forward and backward passes of a stage in 1F1B."""

from titanlite.tools.lab.exercises.exercise import Exercise


def one_f_one_b(device, num_micro_batches):
    """The actions of this rank's stage in 1F1B, such as ["F0", "F1", "B0", "B1"].

    The stage is device.rank, of device.mesh.size. It runs a forward pass ahead for each later
    stage, then one forward and one backward pass in turn, and then the remaining backward passes.
    """
    ahead = min(device.mesh.size - 1 - device.rank, num_micro_batches)
    actions = [f"F{m}" for m in range(ahead)]
    for m in range(num_micro_batches - ahead):
        actions += [f"F{m + ahead}", f"B{m}"]
    return actions + [f"B{m}" for m in range(num_micro_batches - ahead, num_micro_batches)]


EXPECTED = [
    "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
    "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
    "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
]


EXERCISE = Exercise(
    solution=one_f_one_b,
    hint="The last stage runs F0 B0 F1 B1 and so on. Stage s runs W - 1 - s forward passes ahead.",
    inputs=lambda rank: (6,),
    expected=lambda inputs: [line.split() for line in EXPECTED],
)
