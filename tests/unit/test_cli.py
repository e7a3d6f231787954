"""The command `titanlite`: what it lists, how it ends, and what it does when nobody reads on."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import make_commands
import pytest

import titanlite
from titanlite.cli import COMMANDS, main, usage

TITANLITE = (sys.executable, "-m", "titanlite")
TRAIN = (sys.executable, "train.py")
SMALL = (
    "--model.flavor=debug",
    "--training.steps=2",
    "--validation.enable=false",
    "--sampling.num_samples=0",
)


def test_the_page_of_commands_is_current() -> None:
    assert make_commands.page() == make_commands.PAGE.read_text(), "python docs/make_commands.py"


def test_alone_it_lists_each_command_with_a_line_and_an_example() -> None:
    code = (
        "import sys; from titanlite.cli import main; status = main([]);"
        "print(status, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    *lines, last = done.stdout.splitlines()
    assert last == "0 False"
    assert lines == usage().splitlines()
    for name, command in COMMANDS.items():
        at = lines.index(f"  {name:<11}{command.purpose}")
        assert lines[at + 1].strip() == f"$ {command.example}"
        assert shlex.split(command.example)[:2] == ["titanlite", name]
    assert max(map(len, lines)) <= 80


def test_the_examples_name_files_and_options_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(shlex.split(COMMANDS["simulate"].example)[1:]) == 0
    for name in ("train", "verify"):
        assert Path(shlex.split(COMMANDS[name].example)[2]).is_file()
    capsys.readouterr()
    for name in set(COMMANDS) - {"train"}:
        assert main([name, "--help"]) == 0
        examples, usage, *_ = taken = capsys.readouterr().out.split("\n\n")
        both = COMMANDS[name].example, COMMANDS[name].second
        assert examples == "\n  $ ".join(["examples:", *both])
        assert usage.startswith(f"usage: titanlite {name} ")
        for words in map(shlex.split, both):
            assert words[:2] == ["titanlite", name]
            for word in words[2:]:
                option = word.partition("=")[0]
                assert not option.startswith("--") or option in "".join(taken)
        if word := COMMANDS[name].within:
            assert main([name, word, "--help"]) == 0
            words = f"titanlite {name} {word} {COMMANDS[name].of_words[0]}"
            assert capsys.readouterr().out.startswith(f"examples:\n  $ {words}\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"titanlite {titanlite.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "titanlite: no command 'trian'; did you mean train?"),
        ("--versoin", "titanlite: no command '--versoin'; did you mean --version?"),
        ("fly", "titanlite: no command 'fly'; choose from train, "),
        ("verify --stepps=2", "--stepps: there is no such option; did you mean --steps?"),
        ("plan --serch", "plan: --serch: there is no such option; did you mean --search?"),
        ("plan --batchsize 3", "--batchsize: there is no such option; did you mean --training."),
        ("train --hlep", "--hlep: there is no such option; did you mean --help?"),
        ("convert a --ot b", "convert: --ot: there is no such option; did you mean --out?"),
        ("schema --x", "titanlite schema: --x: there is no such option; see --help"),
        ("import x.toml", "titanlite import: x.toml: is no job's name; give torchtitan:NAME"),
        ("train", "job.config_file: no file is given; run titanlite train "),
        ("train nowhere.toml", 'job.config_file: "nowhere.toml" does not exist; '),
        ("verify", "titanlite verify: job.config_file: no file is given; run "),
        ("simulate laddr", "there is no scheme 'laddr'; did you mean ladder or "),
        ("ladder 2d_pp", "titanlite ladder: no rung '2d_pp'; did you mean 2d-pp?"),
        ("ladder 2d-pp --tp 2", "titanlite ladder: --tp: there is no such option; see --help"),
        ("ladder 1d --dp 3", "ladder: 16 items do not divide evenly over dp x ep = 3"),
        ("ladder 0d --compute-units-per-item inf", "inf is not a number up to"),
        ("learn dpp", "topic: there is no 'dpp'; did you mean "),
        ("learn ladder", "topic: ladder is a picture; name its file with --svg"),
        ("learn dp tp --svg x.svg", "--svg: name one picture, of ladder, dp"),
        ("learn dp --svg /proc/none/x.svg", "/proc/none/x.svg: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_command_that_needs_torch_says_what_runs() -> None:
    answers_at_once = {"schema", "simulate", "ladder", "completion"}
    for name in COMMANDS.keys() - answers_at_once:
        module = "titanlite.run" if name == "train" else COMMANDS[name].module
        source = importlib.util.find_spec(module)
        assert source is not None
        assert re.search(r"\btell(ing)?\(", Path(str(source.origin)).read_text()), name


@pytest.mark.parametrize(
    "command",
    [
        TITANLITE,
        *((*TITANLITE, name, "--help") for name in COMMANDS),
        (*TITANLITE, "simulate", "1F1B"),
        (*TITANLITE, "lab"),
        (*TRAIN, "--help"),
        # The first rank prints, which is a process of its own here.
        (*TITANLITE, "train", "configs/fsdp4.toml", "--parallelism.data_parallel_shard_degree=2"),
    ],
    ids=lambda command: " ".join(command[1:]).removeprefix("-m "),
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    if "train" in command and "--help" not in command:
        command = (*command, *SMALL, f"--job.dump_folder={tmp_path}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
        # argparse prints its help to nobody as if it were read. On a busy machine, what takes long
        # says what runs.
        said = re.sub(r"^.* \.\.\.\n", "", said, flags=re.MULTILINE)
        assert (process.wait() in (0, 141), said) == (True, "")
        if "--help" not in command:
            assert process.returncode == 141
