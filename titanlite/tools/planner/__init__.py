"""What a job's step will take on any number of ranks, from a trace of its own code.

events.py      what a traced step does, as plain data (torch-free)
fake_world.py  a world of any size in one process
recorder.py    records operators, communication and memory; operators.py knows their shapes
allocator.py   torch's allocator of a GPU, replayed (torch-free); gaps.py: in a pipeline's stages
scratch.py     what kernels and communication allocate inside themselves, by device
trace.py       builds a job in a fake world and records its second step
pieces.py      traces one block of each kind and what is around the blocks
composition.py pieces as plain data, and the memory of a run of events (torch-free)
compose.py     a step of any size from pieces; segments.py makes its parts (split_backward.py: half
               a backward pass), data_parallel.py adds FSDP and DDP
lower.py       the sends, receives, gathers and reductions of a pipeline's schedule (torch-free)
offload.py     the copies of CPU offload
float8_cast.py the casts of weights that FSDP2 gathers in float8; float8_trace.py records them
cache.py       pieces on disk; scale.py derives those of larger microbatches
hardware.py    the figures of a device, from TOML (hardware/); calibrate.py finds
               those of this machine from what measure.py measures
software.py    other software than today's, in the events of a block
cost.py        the time of an operator and of a communication; fuse.py joins operators
timing.py      the time of a list of events, and of ranks that exchange messages
predict.py     the time of a composed step, with the pipeline's clock
planning.py    the plan of a job from all of these; published.py compares it with published runs
search.py      the best plan for a number of ranks; search_report.py shows it
space.py       the plans of a job; evaluate.py: what each takes, bounds.py: at least
spans.py       what each rank of a predicted step does when, for traces and pictures
report.py      a plan as text, and as plain values; tensors.py: the account of every tensor
html.py        a plan and a search as a page (titanlite/tools/planner/page/)
local.py       whether a job fits in this machine's memory
advice.py      what to change next; hf_job.py: a job from a config.json
command.py     `titanlite plan`
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.tools.planner.from_python import PlanResult as PlanResult

PUBLIC = {"from_python": ("PlanResult",)}
"""The public names, by module."""

lazy(__name__, PUBLIC)
