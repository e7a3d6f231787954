"""`titanlite COMMAND ...`: finds the command and imports only what that one needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from titanlite.errors import TitanliteError
from titanlite.ranks.signals import told_of_interrupt, unwinding_at_sigterm

# command: (module, what it does). The module has main(arguments) -> exit status.
COMMANDS = {
    "sample": ("titanlite.sampling.command", "draw samples from a checkpoint"),
    "convert": ("titanlite.checkpoint.convert", "turn a checkpoint into .safetensors, and back"),
    "simulate": ("titanlite.simulate.command", "draw and compare training schemes in virtual time"),
    "verify": (
        "titanlite.verify.command",
        "compare a plan with one process, and say what is wrong",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2 and one line for what a user got wrong."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: titanlite COMMAND ...\n\ncommands:")
        for command, (_, purpose) in COMMANDS.items():
            print(f"  {command:<10} {purpose}")
        print("\n`titanlite COMMAND --help` tells more.")
        return 0
    if name not in COMMANDS:
        print(f"titanlite: no command {name!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        with unwinding_at_sigterm():
            status: int = import_module(COMMANDS[name][0]).main(rest)
    except KeyboardInterrupt as stop:
        return told_of_interrupt(stop)
    except TitanliteError as error:
        print(f"titanlite {name}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
