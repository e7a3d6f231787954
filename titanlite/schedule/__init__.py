"""Pipeline schedules as plain data, without torch: generate, read, write and check them.

actions.py      Action and Schedule, and their text form
generators.py   make_schedule: GPipe, 1F1B, the interleaved and the zero-bubble families
v_shaped.py     ZBV and DualPipeV
table.py        reads and writes CSV in the format of torch.distributed.pipelining
clock.py        runs the actions of ranks in virtual time, each as soon as it can
walk.py         checks that a schedule runs, and when; reports blocked ranks and missing work
"""

from titanlite.schedule.actions import Action, Schedule, ScheduleError, parse_action
from titanlite.schedule.generators import SCHEDULES, make_schedule, schedule_name
from titanlite.schedule.table import read_csv, write_csv
from titanlite.schedule.walk import Span, bubbles, check, run_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleError",
    "Span",
    "bubbles",
    "check",
    "make_schedule",
    "parse_action",
    "read_csv",
    "run_schedule",
    "schedule_name",
    "write_csv",
]
