"""A configuration out of a checkpoint is data: which of its keys are used, and what is not."""

import sys
from pathlib import Path

import pytest

from titanlite.config.changes import changed_keys, changed_sizes
from titanlite.config.keys import job_keys
from titanlite.config.load import JobConfig
from titanlite.errors import ConfigError
from titanlite.tools.convert.stored import ASKED, DATA, stored_sections

SOURCE = Path("step-4")
# Texts that name something titanlite itself or the model has, or that are shown.
TEXTS = {"job.description", "model.name", "model.flavor", "training.dataset"} | {
    "lora.target_modules"
}


def used_keys() -> list[str]:
    return [
        name
        for name, key in job_keys().items()
        if key.section in DATA
        and key.name == f"{key.section}.{key.leaf}"
        and key.leaf in DATA[key.section]
        and not key.not_yet
    ]


def test_no_key_that_is_used_can_name_a_file_or_a_module():
    used = used_keys()
    assert {"model.name", "training.dtype", "debug.seed"} <= set(used)
    for name in used:
        key = job_keys()[name]
        assert key.type in (bool, int, float) or key.choices or name in TEXTS, name
    assert not ASKED.keys() & set(used)
    for section, keys in DATA.items():
        for key in keys:
            assert f"{section}.{key}" in job_keys()


def test_what_is_not_used_is_dropped():
    stored = {
        "job": {"dump_folder": "/etc", "save_config_file": "../x", "description": "a\x1b[2J" * 100},
        "model": {"flavor": "debug", "num_layers": 3, "hf_assets_path": "/etc"},
        "training": {"dataset": "digits", "steps": 4, "dtype": "float64"},
        "compile": {"enable": True, "backend": "evil"},
        "checkpoint": {"enable": True, "initial_load_path": "/etc"},
        "parallelism": {"pipeline_parallel_schedule_csv": "/dev/zero"},
        "metrics": {"enable_wandb": True},
        "unknown": {"a": 1},
    }
    sections = stored_sections(stored, SOURCE, dict.fromkeys(ASKED))
    description = sections["job"].pop("description")
    assert description.isprintable()
    assert len(description) < 1000
    assert {name: keys for name, keys in sections.items() if keys} == {
        "model": {"flavor": "debug", "num_layers": 3},
        "training": {"dataset": "digits", "dtype": "float64"},
    }


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("experimental.custom_import", "own.model", "--experimental.custom_import=own.model"),
        ("experimental.custom_import", "a; rm -r ~", "--experimental.custom_import"),
        ("experimental.custom_import", "a\x1b[2J", "--experimental.custom_import"),
        ("experimental.custom_import", ["own"], "--experimental.custom_import"),
        ("training.dataset_path", "/data; rm x", "--training.dataset_path='/data; rm x'"),
        ("training.dataset_path", "x" * 9999, "--training.dataset_path"),
    ],
)
def test_what_only_a_user_may_name_is_asked_for(name, value, typed):
    section, key = name.split(".")
    with pytest.raises(ConfigError) as raised:
        stored_sections({section: {key: value}}, SOURCE, dict.fromkeys(ASKED))
    (line,) = raised.value.problems
    assert line.startswith(f"{name}: step-4 names a ")
    assert line.endswith(f"; if you trust it, give {typed}")
    assert line.isprintable()
    given = dict.fromkeys(ASKED) | {name: "mine"}
    assert stored_sections({section: {key: value}}, SOURCE, given)[section][key] == "mine"


def test_a_run_that_goes_on_imports_nothing_that_its_checkpoint_names(tmp_path, monkeypatch):
    (tmp_path / "evil_model.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = JobConfig.from_dict({"model": {"flavor": "debug"}})
    saved = {
        "model": {"flavor": "debug", "num_layers": 10**15},
        "experimental": {"custom_import": "evil_model"},
        "training": {"steps": 4},
    }
    (change,) = changed_sizes(saved, config)
    assert change.startswith(f"model.num_layers {10**15} -> ")
    assert changed_keys(saved, config) == [
        "training.steps 4 -> 10000",
        "the warm-up 4 -> 200 steps",
    ]
    assert "evil_model" not in sys.modules
