"""Expert parallelism: each worker has the attention of all layers and one expert of each layer.

With n workers, each has 1/n of the tokens of every global batch, cut into n equal groups. The
simulator's batches are these groups, so a global batch has n x n of them. All tokens of a group go
to one expert; several groups can go to the same expert. Odd stages are experts; even stages are
attention, which needs all tokens of its worker back.
"""

from titanlite.tools.simulate import ComputeAndWeightWorkers, Costs, Direction, Link, Network, Work

EXPERT_OF_GROUP = [0, 0, 1, 2]  # the router prefers expert 0, and never chooses expert 3


def strategy(work, job):
    source, group = divmod(work.batch % job.workers**2, job.workers)
    worker = source if work.stage % 2 == 0 else EXPERT_OF_GROUP[group] % job.workers
    return ComputeAndWeightWorkers(compute=worker, weight=worker)


def needs(work, job):
    forward = work.direction == Direction.FORWARD
    experts = work.stage - 1 if forward else work.stage + 1
    if work.stage % 2 == 1 or experts < 0:
        return []
    # Attention needs what the experts made of all tokens of its worker.
    first = work.batch - work.batch % job.workers
    return [Work(experts, group, work.direction) for group in range(first, first + job.workers)]


def costs(job):
    layers = job.stages // 2
    return Costs(forward=[1, 1] * layers, backward=[2, 2] * layers, activation_units=1)


network = Network(Link(latency_seconds=0.1, seconds_per_unit=0.2))
