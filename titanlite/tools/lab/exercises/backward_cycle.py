"""Note 10: in which cycle of the clock a stage runs a backward pass."""

from titanlite.tools.lab.exercises.exercise import Exercise


def backward_cycle(device, run, num_runs):
    """The cycle in which this rank's stage computes the backward pass of `run` (from 0).

    N = num_runs runs go through S = device.mesh.size stages. Stage i computes the forward pass of
    run j in cycle i + j. The last stage starts its backward passes, in the order of runs, in the
    cycle after its last forward pass; every other stage one cycle after the next stage.
    """
    last_forward = num_runs - 1 + device.mesh.size - 1
    return last_forward + 1 + (device.mesh.size - 1 - device.rank) + run


EXERCISE = Exercise(
    solution=backward_cycle,
    hint="The last stage's last forward pass is in cycle N + S - 2. Stage i is S - 1 - i stages "
    "before it.",
    inputs=lambda rank: (1, 3),
    expected=lambda inputs: [10, 9, 8, 7],
)
