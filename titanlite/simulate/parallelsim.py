"""The names the parallelsim notebook imports, so that its cells run as they stand.

    from titanlite.simulate import parallelsim
    from titanlite.simulate.parallelsim import ComputeAndWeightWorkers, Work

It defines nothing itself: reloading it, as the notebook does, leaves every class what it was.
"""

from titanlite.simulate.priority import BackwardFirst, OldestBatchFirst, OldestStageFirst
from titanlite.simulate.simulation import simulate
from titanlite.simulate.work import ComputeAndWeightWorkers, Direction, Work

__all__ = [
    "BackwardFirst",
    "ComputeAndWeightWorkers",
    "Direction",
    "OldestBatchFirst",
    "OldestStageFirst",
    "Work",
    "simulate",
]
