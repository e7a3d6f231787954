"""Pipeline schedules as plain data, without torch: generate, read, write and check them.

actions.py      Action and Schedule, and their text form
generators.py   make_schedule: GPipe, 1F1B, the interleaved and the zero-bubble families
v_shaped.py     ZBV and DualPipeV
table.py        reads and writes CSV in the format of torch.distributed.pipelining
clock.py        runs the actions of ranks in virtual time, each as soon as it can
walk.py         checks that a schedule runs, and when; reports blocked ranks and missing work
"""

from titanlite.schedule.actions import Action as Action
from titanlite.schedule.actions import Schedule as Schedule
from titanlite.schedule.actions import ScheduleError as ScheduleError
from titanlite.schedule.actions import parse_action as parse_action
from titanlite.schedule.generators import SCHEDULES as SCHEDULES
from titanlite.schedule.generators import make_schedule as make_schedule
from titanlite.schedule.generators import schedule_name as schedule_name
from titanlite.schedule.table import read_csv as read_csv
from titanlite.schedule.table import write_csv as write_csv
from titanlite.schedule.walk import Span as Span
from titanlite.schedule.walk import bubbles as bubbles
from titanlite.schedule.walk import check as check
from titanlite.schedule.walk import run_schedule as run_schedule
