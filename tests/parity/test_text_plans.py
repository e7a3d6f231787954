"""Text under plans: as on one process, and a run that resumes reads the same text."""

from pathlib import Path
from typing import Any

import pytest

import titanlite
from titanlite.config import JobConfig
from titanlite.errors import ConfigError
from titanlite.tools.verify.verify import Verifier

MODEL = {"name": "llama3", "flavor": "tiny", "dim": 32, "n_layers": 2, "vocab_size": 272}


def test_documents_are_kept_apart_in_shards_of_a_sequence(verifier: Verifier, tmp_path) -> None:
    # Documents of a few tokens, so that every sequence has several, which end on every rank.
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"word " * (n % 7)}{n}"}}\n' for n in range(400)))
    config = JobConfig.from_dict(
        {
            "job": {"dump_folder": str(tmp_path / "out")},
            "model": {**MODEL, "n_heads": 4, "n_kv_heads": 2},
            "training": {
                "dataset": "text",
                "dataset_path": str(text),
                "attend_across_documents": False,
                "seq_len": 64,
                "global_batch_size": 8,
                "local_batch_size": 4,
            },
            "parallelism": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
        }
    )
    found = verifier.verify(config, steps=2)
    assert found.agrees, found.findings


def job(folder: Path, text: Path, **changes: Any) -> Any:
    values: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder)},
        "model": {**MODEL, "n_heads": 4},
        "training": {
            "dataset": "text",
            "dataset_path": str(text),
            "seq_len": 16,
            "global_batch_size": 4,
            "local_batch_size": 4,
        },
        "checkpoint": {"enable": True, "interval": 2, "last_save_model_only": False},
        "sampling": {"num_samples": 1, "num_tokens": 12, "prompt": "ab"},
        "validation": {"enable": True, "freq": 2},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    return JobConfig.from_dict(values)


def test_a_run_resumes_only_on_the_text_that_it_began_with(tmp_path, capsys) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a line of text\n" * 50)
    titanlite.train(job(folder, text, training__steps=2))
    sample = (folder / "samples.txt").read_text()
    assert "--- sample 1 ---\nab" in sample
    assert " bits/byte" in capsys.readouterr().out
    text.write_text("another line of it\n" * 50)
    with pytest.raises(ConfigError) as raised:
        titanlite.train(job(folder, text, training__steps=4))
    (line,) = raised.value.problems
    assert line.startswith(
        "training.dataset: the data have changed since step-2 was saved (then: text, 676 tokens, "
    )
    assert line.endswith(
        '; restore them, or set checkpoint.exclude_from_loading = ["dataloader"] to read the new '
        "data from the start"
    )
    fresh = job(folder, text, training__steps=4, checkpoint__exclude_from_loading=["dataloader"])
    assert titanlite.train(fresh).steps == [3, 4]
