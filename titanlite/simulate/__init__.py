"""Simulate distributed training in virtual time, without torch or a GPU.

work.py         Work, and the two workers that a strategy assigns to it
simulation.py   simulate(): placement plus a priority or an order -> Simulation
engine.py ready.py   greedy list scheduling, event by event; the ready work of each worker
exact.py        exact time: numbers as they are written, ticks inside
costs.py network.py reduction.py   durations, links, gradient reduction
size.py         what a simulation takes; sizes that are too large are refused
result.py       when each work item ran, and what the run cost
schemes.py      the strategies of the notebook and the pipeline schedules, by name
experiment.py   a strategy file: its strategy, order, priority, costs and network
streams.py      ranks with a compute stream and communication streams that share links
gpu.py cluster.py collectives.py ladder.py   0D to 4D on simulated GPUs that exchange messages
"""

from titanlite.simulate.costs import Costs
from titanlite.simulate.network import Link, Network
from titanlite.simulate.priority import BackwardFirst, OldestBatchFirst, OldestStageFirst
from titanlite.simulate.result import Cell, Simulation
from titanlite.simulate.simulation import simulate, simulate_schedule
from titanlite.simulate.work import ComputeAndWeightWorkers, Direction, SimulationError, Work

__all__ = [
    "BackwardFirst",
    "Cell",
    "ComputeAndWeightWorkers",
    "Costs",
    "Direction",
    "Link",
    "Network",
    "OldestBatchFirst",
    "OldestStageFirst",
    "Simulation",
    "SimulationError",
    "Work",
    "simulate",
    "simulate_schedule",
]
