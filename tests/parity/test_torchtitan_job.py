"""A job file of TorchTitan v0.2.2 carries over: its Llama 3 debug model, and the 8B one."""

import json
from pathlib import Path

import pytest

import titanlite
from titanlite import cli
from titanlite.config import parse_args, resolve_job
from titanlite.config.load import override
from titanlite.errors import ConfigError
from titanlite.training.optimizer import lr_factor

# The sections and values of its debug job, without those that equal its defaults.
DEBUG_JOB = """
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_config = false
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 8
seq_len = 2048
steps = 10
dataset = "c4_test"
[parallelism]
data_parallel_shard_degree = -1
[checkpoint]
enable = false
interval = 10
last_save_model_only = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[quantize.linear.float8]
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10
"""
SMALL = {
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.steps": 1,
    "sampling.num_samples": 0,
}
OVERRIDES = ("--training.dataset=pydoc", "--model.hf_assets_path=")


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("debug_model.toml").write_text(DEBUG_JOB)
    return "--job.config_file=debug_model.toml"


def test_what_its_repository_has_is_named_with_the_overrides(job_file: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_args([job_file])
    problems = raised.value.problems
    assert len(problems) == 2
    assert "tests/assets/c4_test, which is not here" in problems[0]
    assert OVERRIDES[0] in problems[0]
    assert "tests/assets/tokenizer/tokenizer.json cannot be read" in problems[1]
    assert f"{OVERRIDES[1]} (empty) for bytes" in problems[1]


def test_it_trains_with_the_overrides(job_file: str) -> None:
    config = parse_args([job_file, *OVERRIDES])
    result = titanlite.train(override(config, {**SMALL, "training.steps": 2}))
    assert result.steps == [1, 2]
    # ln 2,048 = 7.62, and as in TorchTitan somewhat more, since the first logits are not zero.
    assert 7.5 < result.losses[0] < 9


def test_it_runs_as_it_is_beside_its_folders(job_file: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    data, assets = Path("tests/assets/c4_test"), Path("tests/assets/tokenizer")
    data.mkdir(parents=True)
    assets.mkdir(parents=True)
    lines = [{"text": f"the sentence number {index} of a small corpus"} for index in range(600)]
    (data / "data.json").write_text("\n".join(map(json.dumps, lines)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line["text"] for line in lines], trainer)
    tokenizer.save(str(assets / "tokenizer.json"))
    resolved = resolve_job(parse_args([job_file]), 1)
    assert (resolved.seq_len, resolved.global_batch_size) == (2048, 8)
    result = titanlite.train(override(parse_args([job_file]), SMALL))
    assert 7.5 < result.losses[0] < 9


def test_its_learning_rates_and_tokens_a_step(job_file: str) -> None:
    config = parse_args([job_file, *OVERRIDES])
    shape = {
        "warmup_steps": config.warmup_steps,
        "decay_steps": config.decay_steps,
        "total_steps": config.schedule_steps,
    }
    rates = [config.optimizer.lr * lr_factor(step, **shape) for step in range(10)]
    expected = [4e-4, 8e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4]
    assert rates == pytest.approx(expected)
    for num_ranks in (1, 4):
        resolved = resolve_job(config, num_ranks)
        assert resolved.global_batch_size * resolved.seq_len == num_ranks * 8 * 2048


# Its 8B job, in the same way.
JOB_8B = """
[job]
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
[metrics]
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
lr = 3e-4
[training]
dataset = "c4"
seq_len = 8192
local_batch_size = 1
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
[checkpoint]
last_save_model_only = true
export_dtype = "float32"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
[validation]
dataset = "c4_validation"
freq = 500
steps = -1
"""


def test_the_8b_job_is_resolved_for_its_64_ranks(job_file: str) -> None:
    Path("8b.toml").write_text(JOB_8B)
    with pytest.raises(ConfigError) as raised:
        parse_args(["--job.config_file=8b.toml"])
    (problem,) = raised.value.problems
    assert problem.startswith("model.hf_assets_path: assets/hf/Llama-3.1-8B/tokenizer.json cannot")
    resolved = resolve_job(parse_args(["--job.config_file=8b.toml", OVERRIDES[1]]), 64)
    assert resolved.model.num_parameters == 8_030_261_248
    assert resolved.dims.describe() == "dp_shard 64"
    assert resolved.global_batch_size == 64


@pytest.mark.slow
def test_the_8b_job_shows_its_mesh_and_plan_on_any_machine(
    job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("8b.toml").write_text(JOB_8B)
    assert cli.main(["plan", "8b.toml", "--ranks", "64"]) == 0
    shown = capsys.readouterr().out
    assert "\nLlama 3 8B training\n" in shown
    assert "llama3, flavor 8B: 8,030,261,248 parameters" in shown
    assert "selective op  selective op  32 of 32 blocks" in shown
    assert "FSDP 64       FSDP 64       34 units" in shown
    assert "mesh: dp_shard 64 = 64 ranks" in shown
    assert "all_gather      57.1 GiB in 66" in shown
    assert " ".join(shown.split()).endswith("so its vocabulary is not compared with the model's")
