"""Run the script of a rung: titanlite ladder 2d-pp [--dp 4 --items 32 ...]."""

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from titanlite.errors import suggest
from titanlite.tools.learn.ladder.show import describe
from titanlite.tools.options import fitted
from titanlite.tools.simulate.work import SimulationError

# What is typed -> the script's module, and the name of its rung in the table.
SCRIPTS = {
    "0d": ("rung_0d", "0D"),
    "1d-relay": ("rung_1d_dp_relay", "1D DP, relay"),
    "1d": ("rung_1d_dp", "1D DP, ring"),
    "1d-overlap": ("rung_1d_dp_overlap", "1D DP, overlap"),
    "2d-pp": ("rung_2d_dp_pp", "2D DP x PP"),
    "2d-tp": ("rung_2d_dp_tp", "2D DP x TP"),
    "3d": ("rung_3d", "3D DP x PP x TP"),
    "4d-cp": ("rung_4d_cp", "4D with CP"),
    "4d-ep": ("rung_4d_ep", "4D with EP"),
}

USAGE = f"""\
usage: titanlite ladder RUNG [options]

Runs the script of one rung on simulated GPUs: draws what every rank does, checks the result, and
prints what the rung gains and costs. RUNG is one of {", ".join(SCRIPTS)};
2d and 4d run both of theirs. The scripts are titanlite/tools/learn/ladder/rung_*.py.
`RUNG --help` lists the options: degrees, workload, network. `titanlite simulate ladder` prints the
table of all rungs."""


def main(arguments: Sequence[str]) -> int:
    """Run the scripts that the first argument names, and return the exit status.

    Raises SimulationError.
    """
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(fitted(USAGE))
        return 0
    chosen = [name] if name in SCRIPTS else [n for n in SCRIPTS if n.startswith(f"{name}-")]
    if not chosen:
        every = f"choose from {', '.join(SCRIPTS)}"
        raise SimulationError(f"no rung {name!r}; {suggest(name, [*SCRIPTS, '--help'], every)}")
    texts: list[str] = []
    for number, each in enumerate(chosen):
        module, rung = SCRIPTS[each]
        train = import_module(f"titanlite.tools.learn.ladder.{module}").train
        print(end="\n\n" * (number > len(texts)))
        with suppress(SystemExit):  # its help is printed
            texts.append(describe(rung, train, each, options))
    print("\n\n\n".join(texts), end="\n" * bool(texts))
    return 0
