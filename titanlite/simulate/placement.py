"""Call the strategy once per work item and check the workers that it returns.

Work items are numbered in the order in which a batch passes through S stages: number
`batch * 2S + k` is the forward of stage k for k < S, and the backward of stage 2S-1-k for k >= S.
The weight gradient of a split backward runs on the worker of that backward and has no number here.
"""

from __future__ import annotations

from collections.abc import Callable

from titanlite.simulate.work import ComputeAndWeightWorkers, Direction, SimulationError, Work

Strategy = Callable[[Work], ComputeAndWeightWorkers]


def place(
    num_workers: int, num_stages: int, num_batches: int, strategy: Strategy, name: str
) -> tuple[list[int], list[int]]:
    """The compute worker and the weight worker of every work item, by its number.

    Raises SimulationError, which names the work item and the strategy (`name`), if the strategy
    raises, does not return two integers, or returns a worker that does not exist.
    """
    chain = way_of_a_batch(num_stages)
    compute: list[int] = []
    weight: list[int] = []
    make = tuple.__new__  # three times as fast as Work(...), which matters for millions of calls
    work = Work(0, 0, Direction.FORWARD)
    try:
        for batch in range(num_batches):
            for stage, direction in chain:
                work = make(Work, (stage, batch, direction))
                compute_worker, weight_worker = strategy(work)
                if not (0 <= compute_worker < num_workers and 0 <= weight_worker < num_workers):
                    raise SimulationError(_out_of_range(work, strategy, num_workers, name))
                compute.append(compute_worker)
                weight.append(weight_worker)
    except SimulationError:
        raise
    except Exception as error:
        raise SimulationError(_what_went_wrong(work, strategy, name)) from error
    for workers in (compute, weight):
        if set(map(type, workers)) - {int}:
            number = next(i for i, worker in enumerate(workers) if type(worker) is not int)
            stage, direction = chain[number % len(chain)]
            work = Work(stage, number // len(chain), direction)
            raise SimulationError(_what_went_wrong(work, strategy, name))
    return compute, weight


def way_of_a_batch(num_stages: int) -> list[tuple[int, Direction]]:
    """The stage and direction of each work item of a batch: all forwards, then all backwards."""
    forward = [(stage, Direction.FORWARD) for stage in range(num_stages)]
    return forward + [(stage, Direction.BACKWARD) for stage in reversed(range(num_stages))]


def _out_of_range(work: Work, strategy: Strategy, num_workers: int, name: str) -> str:
    compute, weight = strategy(work)
    role, worker = ("compute", compute) if not 0 <= compute < num_workers else ("weight", weight)
    return f"{name} puts {work} on {role} worker {worker}; workers are 0 to {num_workers - 1}"


def _what_went_wrong(work: Work, strategy: Strategy, name: str) -> str:
    try:
        answer = strategy(work)
    except Exception as error:
        return f"{name} raises {type(error).__name__} for {work}: {error}"
    return (
        f"{name} returns {answer!r} for {work}; "
        "it must return ComputeAndWeightWorkers(compute, weight), two integers"
    )
