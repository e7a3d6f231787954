"""Context parallelism: worker p computes part p of every sequence.

A batch is one part of a sequence. Even stages compute queries, keys and values of the part; odd
stages compute attention, which needs the keys and values of all parts, and the feed-forward layer.
"""

from titanlite.tools.simulate import ComputeAndWeightWorkers, Costs, Direction, Link, Network, Work


def strategy(work, job):
    part = work.batch % job.workers
    return ComputeAndWeightWorkers(compute=part, weight=part)


def needs(work, job):
    first = work.batch - work.batch % job.workers
    parts = range(first, first + job.workers)
    if work.direction == Direction.FORWARD and work.stage % 2 == 1:
        return [Work(work.stage - 1, part, Direction.FORWARD) for part in parts]
    if work.direction == Direction.BACKWARD and work.stage % 2 == 0:
        # The gradients of this part's keys and values come from the attention of all parts.
        return [Work(work.stage + 1, part, Direction.BACKWARD) for part in parts]
    return []


def costs(job):
    layers = job.stages // 2
    return Costs(forward=[1, 3] * layers, backward=[2, 6] * layers, activation_units=1)


network = Network(Link(latency_seconds=0.1, seconds_per_unit=0.2))
