"""python -m titanlite.lab: the list, the table of each experiment, the error for a wrong name."""

import subprocess
import sys

import pytest

import titanlite.lab
from titanlite.lab.__main__ import main
from titanlite.lab.experiments import EXPERIMENTS


def test_without_a_name_it_lists_the_experiments_without_torch():
    code = (
        "import sys, runpy; sys.argv = ['lab']\n"
        "try: runpy.run_module('titanlite.lab', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    for name, run in EXPERIMENTS.items():
        assert f"{name:14}{run.__doc__}" in done.stdout
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


def test_a_wrong_name_is_one_line(capsys):
    assert main(["hyperloop"]) == 2
    assert capsys.readouterr().err.startswith("experiment: there is no 'hyperloop'; use one of")


def test_every_public_name_is_there():
    for name in titanlite.lab.__all__:
        assert getattr(titanlite.lab, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'VirtualRouter'"):
        titanlite.lab.VirtualRouter  # noqa: B018
