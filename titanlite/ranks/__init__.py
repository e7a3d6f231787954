"""The processes of a run: starting ranks, rendezvous, stopping, and ending a run that hangs.

launch.py fork_server.py machine.py   local ranks, the process they are forked from, and how many
                       of them this machine can run
world.py attempt.py    the process group, device, threads and allocator of a rank; restarts
peers.py               ranks that agree on values, results and errors
signals.py             SIGINT and SIGTERM as a request to stop
watch.py               the watchdog thread in each rank, which detects hung and lost ranks
notices.py             what one rank of each machine prints about the end of a run
hang_state.py crash_state.py report.py   the state a rank reports, the state of a rank that cannot
                       report, and the hang report made of both
order.py               an optional check that all ranks call the same collectives in one order

This package knows the names of the mesh axes, but not their meaning.
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.ranks.launch import Place as Place
    from titanlite.ranks.launch import spawn as spawn
    from titanlite.ranks.launch import torchrun_place as torchrun_place
    from titanlite.ranks.world import World as World
    from titanlite.ranks.world import open_world as open_world

PUBLIC = {"launch": ("spawn", "torchrun_place", "Place"), "world": ("open_world", "World")}
"""The public names, by module."""

lazy(__name__, PUBLIC)
