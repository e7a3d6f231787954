"""`titanlite COMMAND ...`: find the command and import only the modules it needs."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from titanlite.errors import TitanliteError, suggest
from titanlite.observe.terminal import folded, telling
from titanlite.ranks.signals import ending_with_the_output, interrupt_status, unwinding_at_sigterm
from titanlite.tools.options import fitted, program
from titanlite.version import VERSION

if TYPE_CHECKING:
    from titanlite.start import Tools


@dataclass(frozen=True)
class Command:
    """A command: `function` of `module` takes the arguments and returns the exit status."""

    module: str
    purpose: str
    example: str
    second: str  # another example, which --help shows
    function: str = "main"
    has_own_end: bool = False
    """Whether the function handles signals and errors itself."""
    starts_ranks: bool = False
    """Whether every job of the command runs on local ranks."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Modules of commands of their own: the first argument -> module."""
    of_torchtitan: str = ""
    """The function for jobs of TorchTitan, whose names begin with TORCHTITAN."""
    words: str = ""
    """For completion: the table of words that may follow, as module:name."""
    within: str = ""
    """For completion: a word whose own --help has further options."""
    of_words: tuple[str, str] = ("", "")
    """The examples of the --help of `within` and its like, after that word."""


TORCHTITAN = "torchtitan:"

ABOUT = "Finds the parallel bug that a loss curve hides, in PyTorch code, on a laptop."
COMMANDS = {
    "train": Command(
        "titanlite.cli",
        "train a model, like train.py; also under torchrun",
        "titanlite train configs/tp2_fsdp2.toml --training.steps=100",
        "titanlite train --help parallelism",
        function="train",
        has_own_end=True,
    ),
    "sample": Command(
        "titanlite.tools.sample.command",
        "draw samples from a checkpoint",
        "titanlite sample outputs/run/checkpoint --out samples.png",
        'titanlite sample outputs/text/checkpoint --prompt "import "',
    ),
    "convert": Command(
        "titanlite.tools.convert.command",
        "convert a checkpoint to .safetensors, or back",
        "titanlite convert outputs/run/checkpoint --out model.safetensors",
        "titanlite convert model.safetensors --out outputs/new/checkpoint",
    ),
    "verify": Command(
        "titanlite.tools.verify.command",
        "compare a plan with one process, and name the cause of a difference",
        "titanlite verify configs/tp2_fsdp2.toml --steps=2",
        "titanlite verify --matrix --ranks 4",
        starts_ranks=True,
        of_torchtitan="verify",
    ),
    "debug": Command(
        "titanlite.tools.debug.command",
        "open pdb in one rank of a job, while all others stand still",
        "titanlite debug configs/tp2_fsdp2.toml --rank 3",
        "titanlite debug configs/tp2_fsdp2.toml --record messages.html",
        of_torchtitan="debug",
    ),
    "import": Command(
        "titanlite.tools.torchtitan.command",
        "print a configuration of TorchTitan 0.3 as a job in TOML",
        "titanlite import torchtitan:llama3_8b",
        "titanlite import torchtitan:llama3_debugmodel > job.toml",
        function="to_toml",
    ),
    "schema": Command(
        "titanlite.tools.json_schema",
        "print the JSON Schema of a job, with which editors check its TOML",
        "titanlite schema > titanlite.schema.json",
        "titanlite schema | grep -A 4 pipeline_parallel_schedule",
    ),
    "plan": Command(
        "titanlite.tools.planner.command",
        "show what a step takes on any number of ranks, before it runs",
        "titanlite plan configs/plan/llama_405b.toml",
        "titanlite plan configs/tp2_fsdp2.toml --hardware h100",
        of_torchtitan="plan",
    ),
    "simulate": Command(
        "titanlite.tools.simulate.command",
        "draw and compare training schemes in virtual time",
        "titanlite simulate 1F1B --workers 4 --batches 8",
        "titanlite simulate GPipe --compare 1F1B --svg out.svg",
        parts={"ladder": "titanlite.tools.learn.ladder.command"},
        words="titanlite.tools.simulate.schemes:SCHEMES",
        within="ladder",
        of_words=("--dp 4 --tp 2", "--svg ladder.svg"),
    ),
    "learn": Command(
        "titanlite.tools.learn.command",
        "answer a question on each parallelism: formula, simulated, measured",
        "titanlite learn dp",
        "titanlite learn roofline --svg roofline.svg",
        words="titanlite.tools.learn.topics:TOPICS",
    ),
    "lab": Command(
        "titanlite.tools.lab.command",
        "build every parallelism from send and receive, on real ranks",
        "titanlite lab all",
        "titanlite lab zero --world 2",
        words="titanlite.tools.lab.experiments:EXPERIMENTS",
        within="exercise",
        of_words=("ring_all_reduce mine.py --start", "ring_all_reduce mine.py"),
    ),
    "ladder": Command(
        "titanlite.tools.learn.ladder.scripts",
        "one training step on 1D to 4D simulated GPUs, each a script",
        "titanlite ladder 2d-pp",
        "titanlite ladder 3d --help",
        words="titanlite.tools.learn.ladder.scripts:SCRIPTS",
        within="3d",
        of_words=("--items 32", "--svg step.svg"),
    ),
    "completion": Command(
        "titanlite.cli",
        "complete commands, options and keys in bash, zsh or fish",
        "titanlite completion bash > ~/.titanlite.bash",
        "titanlite completion fish > ~/.config/fish/completions/titanlite.fish",
        function="completion",
        words="titanlite.tools.completion:SHELLS",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; a user's mistake is one line and status 2."""
    is_process = arguments is None
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    are_threads = "--threads" in rest or (_is_of_torchtitan(rest) and "--processes" not in rest)
    runs = name in COMMANDS and rest and not {"-h", "--help"} & set(rest)
    if is_process and runs and COMMANDS[name].starts_ranks:
        from titanlite.ranks.fork_server import prepare_environment, start_fork_server

        prepare_environment()
        if not are_threads:
            # The fork server's imports take longer than the command's own.
            start_fork_server()
    with ending_with_the_output():
        status = _run(name, rest)
    if is_process and name in COMMANDS and COMMANDS[name].has_own_end and "torch" in sys.modules:
        # Everything is closed. Skip unloading torch: its threads sometimes abort the process then.
        sys.stderr.flush()
        os._exit(status)
    return status


def train(arguments: Sequence[str]) -> int:
    """`titanlite train FILE [--section.key=value ...]`; returns the exit status."""
    from titanlite.run import command

    return command(arguments, tools(), f"{program()} train")


def completion(arguments: Sequence[str]) -> int:
    """`titanlite completion SHELL`; returns the exit status."""
    tool: Any = import_module("titanlite.tools.completion")
    return int(tool.show(arguments, COMMANDS, main))


def tools() -> "Tools":
    """What the commands hand to a run: the planner, and what draws its pictures."""
    from titanlite.start import Tools

    planner: Any = import_module("titanlite.tools.planner.local")
    return Tools(planner, import_module("titanlite.tools.gallery"))


def usage() -> str:
    """The text of `titanlite --help`: each command with one line of text and an example."""
    lines = ["usage: titanlite COMMAND ...", "       titanlite --version"]
    lines += ["", ABOUT, "", "commands:"]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<11}{command.purpose}", f"  {'':<11}$ {command.example}"]
    return fitted("\n".join([*lines, "", "Run `titanlite COMMAND --help` for details."]))


def _with_examples(command: Command, typed: str, text: str) -> str:
    """The help `text` of a command below its examples, or of the word that was typed after it."""
    examples = [command.example, command.second]
    if f"usage: {program()} {typed} " in text:
        examples = [f"titanlite {typed} {words}" for words in command.of_words]
    return "\n".join([fitted("\n  $ ".join(["examples:", *examples])), "", text.rstrip()])


def _is_of_torchtitan(words: Sequence[str]) -> bool:
    return any(word.startswith(TORCHTITAN) for word in words)


def _run(name: str, rest: Sequence[str]) -> int:
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"titanlite {VERSION}")
        return 0
    if name not in COMMANDS:
        known = [*COMMANDS, "--help", "--version"]
        advice = suggest(name, known, f"choose from {', '.join(COMMANDS)}")
        print(folded(f"titanlite: no command {name!r}; {advice}", sys.stderr), file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        with nullcontext() if command.has_own_end else unwinding_at_sigterm():
            module, function, words = command.module, command.function, list(rest)
            if words and words[0] in command.parts:
                module = command.parts[words.pop(0)]
            elif command.of_torchtitan and _is_of_torchtitan(rest):
                module, function = "titanlite.tools.torchtitan.command", command.of_torchtitan
            with telling(f"loading titanlite {name}"):
                run = getattr(import_module(module), function)
            if command.has_own_end or not {"-h", "--help"} & set(rest):
                return int(run(words))
            with redirect_stdout(io.StringIO()) as text:
                try:
                    status = int(run(words))
                except SystemExit as end:
                    status = int(end.code or 0)
            if not status:
                print(_with_examples(command, f"{name} {rest[0]}", text.getvalue()))
            return status
    except KeyboardInterrupt as stop:
        return interrupt_status(stop)
    except TitanliteError as error:
        print(folded(f"titanlite {name}: {error}", sys.stderr), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
