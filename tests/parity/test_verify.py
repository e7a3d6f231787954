"""`titanlite verify` as a user calls it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

from titanlite.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_right_plan(capsys, tmp_path):
    out = tmp_path / "out.json"
    config = str(CONFIGS / "tp2_fsdp2.toml")
    assert main(["verify", config, "--shrink", "--steps=2", f"--json={out}"]) == 0
    printed = capsys.readouterr().out
    assert "dp_shard 2 x tp 2, 4 ranks" in printed
    assert "shrunk     dim 96 -> 48" in printed
    assert "\nAGREES: " in printed
    found = json.loads(out.read_text())
    assert found["agrees"]
    assert found["margin"] > 100
    assert found["failures"] == found["diagnosis"] == []
    assert [row["step"] for row in found["steps"]] == [0, 1, 2]
    assert found["steps"][1]["gradients"].keys() == found["steps"][1]["weights"].keys()
    assert 0 < max(found["steps"][2]["weights"].values()) < 1e-13


def test_float32_and_bfloat16_are_judged_by_the_references_own_rounding(capsys):
    for dtype in ("float32", "bfloat16"):
        config = str(CONFIGS / "hsdp2x2.toml")
        assert main(["verify", config, "--shrink", "--steps=3", f"--dtype={dtype}"]) == 0
        assert "AGREES" in capsys.readouterr().out
