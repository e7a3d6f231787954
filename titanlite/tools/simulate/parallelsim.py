"""The names that the parallelsim notebook imports, so its cells run unchanged.

    from titanlite.tools.simulate import parallelsim
    from titanlite.tools.simulate.parallelsim import ComputeAndWeightWorkers, Work

This module only re-exports: the notebook reloads it, which must not create new classes.
"""

from titanlite.tools.simulate.priority import BackwardFirst, OldestBatchFirst, OldestStageFirst
from titanlite.tools.simulate.simulation import simulate
from titanlite.tools.simulate.work import ComputeAndWeightWorkers, Direction, Work

__all__ = [
    "BackwardFirst",
    "ComputeAndWeightWorkers",
    "Direction",
    "OldestBatchFirst",
    "OldestStageFirst",
    "Work",
    "simulate",
]
