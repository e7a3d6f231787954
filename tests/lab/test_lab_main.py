"""titanlite lab: the list, the table of each experiment, the error for a wrong name."""

import re
import subprocess
import sys

import pytest

import titanlite.tools.lab
from titanlite.cli import main as command
from titanlite.tools.lab.experiments import EXPERIMENTS
from titanlite.tools.lab.table import Samples, compared


def main(arguments):
    return command(["lab", *arguments])


def test_without_a_name_it_lists_the_experiments_without_torch():
    code = (
        "import sys; from titanlite.cli import main\nmain(['lab']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    words = " ".join(done.stdout.split())
    assert all(
        " ".join(f"{name} {run.__doc__}".split()) in words for name, run in EXPERIMENTS.items()
    )
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize("name", ["collectives", "tensor", "mlp"])
def test_an_experiment_prints_its_table(name, capsys):
    assert main([name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"\n{name}:")
    words = " ".join(out.split())
    expected = {
        "collectives": "all_reduce 12 / 384 B 24 / 192 B [6, 10, 14, 18]",
        "tensor": "32 all_gather",
        "mlp": "stage 3 . . . F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5 . . .",
    }
    assert expected[name] in words


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, capsys):
    assert main([name]) == 0
    assert capsys.readouterr().out.count("\n") > 5


def test_every_public_name_is_there():
    for name in titanlite.tools.lab.__all__:
        assert getattr(titanlite.tools.lab, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'VirtualRouter'"):
        titanlite.tools.lab.VirtualRouter  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hyperloop"], "experiment: there is no 'hyperloop'; choose from collectives, .*, all"),
        (["mlp", "--world", "3"], "--world: mlp has no such option; it has --microbatches"),
        (["all", "--bytes", "8"], "--bytes: collectives has no such option; it has --world"),
        (["--repeats", "3"], "--repeats: name an experiment to run"),
        (["bandwidth", "--world", "0"], "--world: 0 is less than 1"),
        (["bandwidth", "--world", "2.5"], "--world: '2.5' is not a whole number"),
        (["overlap", "--latency-seconds", "inf"], ".*: 'inf' is not a number of at least 0"),
        (["overlap", "--bytes-per-second", "fast"], ".*: 'fast' is not a number of at least 0"),
    ],
)
def test_misuse_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert re.fullmatch(f"titanlite lab: {message}\n", capsys.readouterr().err)


def test_an_experiment_takes_options(capsys):
    assert main(["collectives", "--world", "3"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    # 3 ranks, 24 bytes each: 2 peers naive; 2 (W-1) messages of 8 bytes on the ring.
    assert "all_reduce 6 / 144 B 12 / 96 B [3, 6, 9]" in words


def test_a_difference_is_claimed_only_if_all_samples_show_it():
    slow, fast = Samples((5.0, 4.0, 6.0, 5.0)), Samples((3.0, 3.5, 3.9, 2.0))
    assert fast.text(10, 0) == "32 (20 to 39)"
    assert compared(slow, fast) == "faster by 35%"
    assert compared(fast, slow) == "slower by 54%"
    assert compared(slow, Samples((*fast.values, 4.0))) == "no difference seen"
    assert compared(Samples((9.0, 9.0, 9.0)), Samples((1.0,) * 5)).startswith("not judged: fewer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--world", "6", "--tokens", "100"], "use a multiple of 12"),
        (["bandwidth", "--world", "3", "--bytes", "100"], "parts; use a multiple of 12"),
        (["bandwidth", "--world", "1"], "world: a single rank sends nothing; use at least 2"),
        (["overlap", "--world", "3"], "world: 4 layers of 128 x 128 do not divide among 3 ranks"),
        (["experts", "--experts", "6"], "experts: 6 experts do not divide among 4 ranks"),
        (["experts", "--top-k", "9"], "top-k: 9 is more than the 8 experts"),
    ],
)
def test_sizes_that_do_not_fit_are_said_before_ranks_start(arguments, message, capsys):
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{arguments[0]}: ")
    assert message in err
    assert err.count("\n") == 1
