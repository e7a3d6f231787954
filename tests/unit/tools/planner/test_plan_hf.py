"""`titanlite plan --hf`: a model from its config.json, without a TOML."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.tools.planner.cache import load_pieces
from titanlite.tools.planner.hf_job import hf_job
from titanlite.tools.planner.planning import resolve

pytest.importorskip("transformers")
SIZES = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
SIZES |= {"num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 512}


def write(folder: Path, **sizes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**SIZES, **sizes}))
    return str(folder)


def test_a_config_json_is_planned_on_degrees_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures = tmp_path / "figures.json"
    arguments = ["plan", "--hf", write(tmp_path, attention_dropout=0.1), "--json", str(figures)]
    tp = "--parallelism.tensor_parallel_degree=2"
    assert cli.main([*arguments, "--ranks=512", tp, "--hardware=rtx4090"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "512 ranks: dp_shard 256 x tp 2" in shown
    assert "sequence 512 tokens of a vocabulary of 512" in shown
    assert "note: dropout: planned without; titanlite refuses attention_dropout" in shown
    assert "note: hardware: not calibrated; no run on NVIDIA GeForce RTX 4090" in shown
    assert json.loads(figures.read_text())["time"]["mfu"] > 0


def test_the_operations_of_a_model_without_a_formula_are_those_of_all_its_blocks(
    tmp_path: Path,
) -> None:
    words, notes = hf_job(write(tmp_path))
    resolved, _ = resolve(words, None, 1)
    weights = 6 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 512
    found = load_pieces(resolved, use_cache=False).flops_per_token
    assert (found, notes) == (6 * weights + 12 * 6 * 256 * 512, [])


def test_what_cannot_be_planned_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert cli.main(["plan", *arguments]) == 2
        return capsys.readouterr().err

    folder = write(tmp_path, model_type="bert", max_position_embeddings=64)
    assert "model.path: BertLMHeadModel has no single list of blocks" in error("--hf", folder)
    assert "leave out one of them" in error("configs/tp2_fsdp2.toml", "--hf", folder)
    assert "is not called config.json; give that file" in error("--hf", str(tmp_path / "a.json"))
    (tmp_path / "config.json").write_text("{}")
    assert "has no model_type; give one that transformers wrote" in error("--hf", folder)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in error("--hf", folder)
