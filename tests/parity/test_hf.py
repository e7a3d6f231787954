"""Models of Hugging Face, their files unmodified, agree with one process under plans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import load_config, make_config
from titanlite.errors import ConfigError
from titanlite.verify.verify import Verifier

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 17,
    "max_position_embeddings": 64,
}
PLANS: dict[str, dict[str, int]] = {
    "TP x FSDP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
    "PP x CP": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
}


def job(config_class: str, plan: dict[str, int], **values: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": {"name": "hf", "config_class": config_class, "values": {**SIZES, **values}},
        "training": {"dataset": "digits", "global_batch_size": 8, "local_batch_size": 2},
        "lr_scheduler": {"warmup_steps": 2},
        "activation_checkpoint": {"mode": "none"},
        "parallelism": plan,
    }


@pytest.fixture(scope="module")
def transformers_verifier() -> Iterator[Verifier]:
    pytest.importorskip("transformers")
    with Verifier(timeout_seconds=200) as verifier:
        yield verifier


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_llama_agrees(transformers_verifier: Verifier, plan: dict[str, int]) -> None:
    found = transformers_verifier.verify(make_config(job("LlamaConfig", plan)), steps=2)
    assert found.agrees, found.findings
    assert 1e-6 / found.margin < 1e-12


@pytest.mark.slow
def test_tied_qwen3_with_norms_of_heads_agrees(transformers_verifier: Verifier) -> None:
    plan = PLANS["TP x FSDP"]
    config = make_config(job("Qwen3Config", plan, head_dim=16, tie_word_embeddings=True))
    found = transformers_verifier.verify(config, steps=2)
    assert found.agrees, found.findings
    assert 1e-6 / found.margin < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [("pipeline_parallel", "context_parallel"), ("data_parallel_shard",)]
)
def test_tied_gpt2_agrees(transformers_verifier: Verifier, axes: tuple[str, ...]) -> None:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 17}
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sections = job("GPT2Config", {f"{axis}_degree": 2 for axis in axes})
    sections["model"]["values"] = {**sizes, **off}
    found = transformers_verifier.verify(make_config(sections), steps=2)
    assert found.agrees, found.findings


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of sizes only look whether transformers is there."""
    find = "titanlite.models.hf.config.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: object())


@pytest.mark.usefixtures("installed")
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    def problems(plan: dict[str, int], config_class: str = "LlamaConfig", **values: Any) -> Any:
        with pytest.raises(ConfigError) as caught:
            make_config(job(config_class, plan, **values))
        return caught.value.problems

    assert problems({}, "BertConfig") == (
        "model.config_class: BertConfig has no plan; give GPT2Config, LlamaConfig, MistralConfig, "
        "Qwen2Config, Qwen3Config",
    )
    assert problems({}, "GPT2Config", resid_pdrop=0) == (
        "model.values: GPT-2 drops out differently under each plan; set attn_pdrop, embd_pdrop to "
        "0",
    )
    assert problems({"tensor_parallel_degree": 4}) == (
        "parallelism.tensor_parallel_degree: 4 does not divide num_key_value_heads 2; give one of "
        "1, 2",
    )
    assert problems({}, sliding_window=32) == (
        "training.seq_len: 64 tokens are more than sliding_window 32, and windows are not "
        "supported; give at most 32",
    )
    assert problems({}, attention_dropout=0.1) == (
        "model.values: attention_dropout 0.1 differs between plans; set it to 0",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(["--model.name=hf", f"--model.path={tmp_path}"])
    assert caught.value.problems[0].startswith(f'model.path: "{tmp_path}" has no config.json')


def test_without_transformers_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("titanlite.models.hf.config.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        make_config(job("LlamaConfig", {}))
    assert caught.value.problems == (
        'model.name: "hf" needs transformers; install titanlite[hf], or another model',
    )
