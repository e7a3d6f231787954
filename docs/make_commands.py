"""Write docs/commands.md from the commands themselves: `python docs/make_commands.py`."""

from __future__ import annotations

from pathlib import Path

from titanlite.cli import COMMANDS

PAGE = Path(__file__).parent / "commands.md"

# The page on a command, and a second example beside that of `titanlite --help`.
MORE = {
    "train": ("observe.md", "titanlite train configs/llama_tiny.toml --training.steps=500"),
    "sample": ("text.md", 'titanlite sample outputs/run/checkpoint --prompt "The "'),
    "convert": ("huggingface.md", "titanlite convert model.safetensors --out checkpoint"),
    "verify": ("verify.md", "titanlite verify --matrix --ranks 4 --limit 2"),
    "debug": ("threads.md", "titanlite debug configs/pp2_tp2.toml --record step.html"),
    "import": (
        "torchtitan.md",
        "titanlite import torchtitan:llama3_debugmodel"
        " --parallelism.tensor_parallel_degree=2 > job.toml",
    ),
    "schema": ("configuration.md", "titanlite schema | grep -A 4 pipeline_parallel_schedule"),
    "plan": (
        "plan.md",
        "titanlite plan configs/llama_tiny.toml --ranks 8 --hardware h100 --search",
    ),
    "simulate": (
        "simulate.md",
        "titanlite simulate GPipe --workers 4 --batches 8 --compare 1F1B ZBV --svg schedules.svg",
    ),
    "learn": ("learn.md", "titanlite learn roofline --svg roofline.svg"),
    "lab": ("lab/README.md", "titanlite lab exercise ring_all_reduce mine.py --start"),
    "ladder": ("ladder.md", "titanlite ladder 4d"),
    "completion": (
        "start/install.md",
        "titanlite completion fish > ~/.config/fish/completions/titanlite.fish",
    ),
}


def page() -> str:
    parts = [
        "# Commands\n\n"
        "Each command prints its options with `--help`. Every command that takes a job also takes "
        "the job's keys,\nas `--section.key=value` ([configuration.md](configuration.md)). "
        "`titanlite --version` prints the version.\n"
        "The configs are those of a clone. This page is made by `python docs/make_commands.py`.\n"
    ]
    for name, command in COMMANDS.items():
        link, example = MORE[name]
        purpose = command.purpose[0].upper() + command.purpose[1:]
        parts.append(
            f"## {name}\n\n{purpose}: [{link}]({link}).\n\n```\n{command.example}\n{example}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
