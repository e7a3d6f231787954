"""Simulate distributed training in virtual time, without torch or a GPU.

work.py         Work, and the two workers that a strategy assigns to it
simulation.py   simulate(): placement plus a priority or an order -> Simulation
plan.py placement.py engine.py   greedy list scheduling, event by event
exact.py        exact time: numbers as they are written, ticks inside
costs.py network.py reduction.py   durations, links, gradient reduction
size.py         what a simulation takes; sizes that are too large are refused
details.py      the arguments that are not the default, for the title of a picture
result.py memory.py   when each work item ran, what the run cost, what filled the memory
schemes.py      the strategies of the notebook and the pipeline schedules, by name
experiment.py   a strategy file: its strategy, order, priority, needs, costs and network
sweep.py        a grid of simulations and its Pareto fronts
streams.py     a rank with a compute stream and communication streams that share links
gpu.py collectives.py   simulated GPUs that exchange messages
integer_model.py train_step.py   a training step on them, exact in integers, under any plan
"""

from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.experiment import JobSizes
from titanlite.tools.simulate.memory import Memory
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.priority import BackwardFirst, OldestBatchFirst, OldestStageFirst
from titanlite.tools.simulate.result import Cell, Simulation
from titanlite.tools.simulate.simulation import simulate, simulate_schedule
from titanlite.tools.simulate.work import ComputeAndWeightWorkers, Direction, SimulationError, Work

__all__ = [
    "BackwardFirst",
    "Cell",
    "ComputeAndWeightWorkers",
    "Costs",
    "Direction",
    "JobSizes",
    "Link",
    "Memory",
    "Network",
    "OldestBatchFirst",
    "OldestStageFirst",
    "Simulation",
    "SimulationError",
    "Work",
    "simulate",
    "simulate_schedule",
]
