"""What the shells complete with the script of `titanlite completion`."""

import shutil
import subprocess

import pytest

from titanlite.cli import main

CASES = {
    "titanlite veri": ["verify"],
    "titanlite verify configs/tp2_f": ["configs/tp2_fsdp2.toml"],
    "titanlite verify a.toml --until": ["--until-stable"],
    "titanlite train --parallelism.tensor": ["--parallelism.tensor_parallel_degree"],
    "titanlite lab exercise --sta": ["--start"],
    "titanlite simulate DDP --priority old": ["oldest-batch", "oldest-stage"],
}
ASK = {
    "bash": "COMP_LINE='{0}' COMP_POINT={1} COMP_WORDS=({0}) COMP_CWORD={2}; _titanlite\n"
    "printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "fish": "complete -C '{0}'",
}


@pytest.mark.parametrize("shell", ASK)
def test_words_are_completed(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    printed, script = capsys.readouterr().out, tmp_path / "script"
    for typed, expected in CASES.items():
        ask = ASK[shell].format(typed, len(typed), typed.count(" "))
        script.write_text(f"{printed}\n{ask}\n")
        said = subprocess.run([shell, script], capture_output=True, text=True, check=True).stdout
        found = [line.partition("\t")[0].strip().rstrip("=") for line in said.splitlines()]
        assert found == expected, typed
