"""Good jobs: what a file and a command line come to, and what a person is told about the keys."""

import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import JobConfig, load_model_spec, make_model_config, override, parse_args
from titanlite.config.changes import changed_keys
from titanlite.config.document import format_config
from titanlite.config.keys import job_keys
from titanlite.config.toml import parse_toml
from titanlite.errors import ConfigError, quote
from titanlite.fields import OWN
from titanlite.models.spec import ModelSpec
from titanlite.observe.run_facts import name_idle_keys
from titanlite.registry import MODELS

ROOT = Path(__file__).parents[3]


def test_no_file_and_no_argument_is_a_job() -> None:
    config = parse_args([])
    assert config == JobConfig.from_dict({}) == JobConfig()
    assert config.model.name == "image_transformer"
    assert config.training.dataset == "digits"
    assert config.debug.seed == 0
    assert config.training.seq_len is None


def test_command_line_goes_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[training]\nsteps = 10\nlocal_batch_size = 4\n[compile]\nenable = true\n")
    config = parse_args([f"--job.config_file={file}", "--training.steps", "20"])
    assert config.job.config_file == str(file)
    assert (config.training.steps, config.training.local_batch_size) == (20, 4)
    assert config.compile.enable


def test_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\nsteps = 10\n")
    assert parse_args(["--job.config_file", str(file)]).training.steps == 10


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--training.steps=10"], "training.steps", 10),
        (["--training.steps", "10"], "training.steps", 10),
        (["--training.steps=10_000"], "training.steps", 10_000),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.local-batch-size=2"], "training.local_batch_size", 2),
        (["--training.steps=1", "--training.steps=2"], "training.steps", 2),
        (["--training.seq_len=64"], "training.seq_len", 64),
        (["--training.seq_len=64", "--training.seq_len=none"], "training.seq_len", None),
        (["--training.max_norm=inf"], "training.max_norm", math.inf),
        (["--optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--compile.enable=true"], "compile.enable", True),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.enable=True"], "compile.enable", True),
        (["--compile.enable", "--training.steps=3"], "compile.enable", True),
        (["--compile.enable=false"], "compile.enable", False),
        (["--compile.components=loss"], "compile.components", ("loss",)),
        (["--compile.components=model,loss"], "compile.components", ("model", "loss")),
        (["--compile.components", "model, loss"], "compile.components", ("model", "loss")),
        (['--compile.components=["loss"]'], "compile.components", ("loss",)),
        (["--compile.components=[model,loss]"], "compile.components", ("model", "loss")),
        (["--compile.components="], "compile.components", ()),
        (["--job.description=a = b"], "job.description", "a = b"),
        (["--job.description=10"], "job.description", "10"),
        (["--activation_checkpoint.selective_ac_option=op"], None, None),
        (["--activation_checkpoint.selective_ac_option=12"], None, None),
        (["--parallelism.context_parallel_rotate_method=allgather"], None, None),
        (["--activation_checkpoint.mode=memory_budget", "--compile.enable"], None, None),
        (["--lr_scheduler.warmup_steps=20", "--training.steps=20"], None, None),
    ],
)
def test_command_line_forms(argv: list[str], key: str | None, value: Any) -> None:
    config = parse_args(argv)
    if key:
        section, _, leaf = key.partition(".")
        assert getattr(getattr(config, section), leaf) == value


def test_every_key_is_torchtitans_with_its_default_or_said_to_be_titanlites_own() -> None:
    theirs = json.loads((ROOT / "tests/golden/torchtitan_keys.json").read_text())["keys"]
    ours = {}
    for name, key in job_keys().items():
        if key.torchtitan is not OWN:
            default = key.default if key.torchtitan is ... else key.torchtitan
            ours[name] = list(default) if isinstance(default, tuple) else default
    assert ours == theirs


def test_what_a_torchtitan_file_asks_beyond_titanlite_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nconverters = ["quantize.linear.mx"]\n')
    argv = [
        "--checkpoint.initial_load_in_hf_quantized",
        "--parallelism.expert_tensor_parallel_degree=4",
        "--parallelism.expert_parallel_comm_backend=deepep",
    ]
    with pytest.raises(ConfigError) as caught:
        parse_args([f"--job.config_file={file}", *argv])
    lack = "asks for a TorchTitan feature that titanlite does not have; write"
    assert sorted(caught.value.problems) == [
        f"checkpoint.initial_load_in_hf_quantized: true {lack} false, or remove this option",
        'model.converters: "quantize.linear.mx" asks for a TorchTitan feature that titanlite does '
        'not have; give a list of "quantize.linear.float8"',
        'parallelism.expert_parallel_comm_backend: "deepep" asks for a TorchTitan feature that '
        'titanlite does not have; give "standard"',
        f"parallelism.expert_tensor_parallel_degree: 4 {lack} 1, or remove this option",
    ]


IDLE_KEYS = """
[model]
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[parallelism]
pipeline_parallel_expert_parallel_overlap = false
[quantize.linear.mx]
filter_fqns = ["wo"]
recipe_name = "mxfp8_emulated"
[quantize.grouped_mm.float8]
fqns = ["experts"]
[fault_tolerance]
group_size = 2
"""


def test_keys_of_features_that_are_off_are_accepted_and_named(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(IDLE_KEYS)
    config = parse_args([f"--job.config_file={file}"])
    assert name_idle_keys(config) == (
        "no effect here, because their TorchTitan feature is off: "
        "parallelism.pipeline_parallel_expert_parallel_overlap, quantize.linear.mx.recipe_name, "
        "quantize.linear.mx.filter_fqns, quantize.grouped_mm.float8.fqns, "
        "fault_tolerance.group_size"
    )
    assert name_idle_keys(parse_args([])) == ""
    # The key that turns a feature on is refused, and they need no line of their own.
    with pytest.raises(ConfigError) as caught:
        parse_args([f"--job.config_file={file}", "--model.converters=quantize.linear.mx"])
    assert [line.partition(":")[0] for line in caught.value.problems] == ["model.converters"]


def test_every_default_is_accepted_when_written_out() -> None:
    values: dict[str, Any] = {}
    for key in job_keys().values():
        if key.default is None:
            continue
        section = values
        for name in key.section.split("."):
            section = section.setdefault(name, {})
        section[key.leaf] = list(key.default) if isinstance(key.default, tuple) else key.default
    assert JobConfig.from_dict(values) == JobConfig()


def test_mixed_precision_follows_dtype_unless_set() -> None:
    training = JobConfig.from_dict({"training": {"dtype": "float64"}}).training
    assert (training.param_dtype, training.reduce_dtype) == ("float64", "float64")
    training = override(
        JobConfig.from_dict({}), {"training.mixed_precision_param": "bfloat16"}
    ).training
    assert (training.param_dtype, training.reduce_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("keys", "steps", "expected"),
    [
        ({}, 10_000, (200, 9_800)),
        ({}, 20, (20, 0)),
        ({"decay_ratio": 0.5}, 20, (10, 10)),
        ({"decay_ratio": 0.0}, 1_000, (200, 0)),
        ({"warmup_steps": 5}, 20, (5, 15)),
        ({"warmup_steps": 5, "total_steps": 100}, 20, (5, 95)),
        ({"warmup_steps": 0, "decay_ratio": 1.0}, 20, (0, 20)),
        ({"warmup_steps": 30}, 3, (3, 0)),
        ({"warmup_steps": 30, "total_steps": 100}, 3, (30, 70)),
        ({"warmup_steps": 30, "total_steps": 20}, 3, (20, 0)),
        ({"warmup_steps": 20, "decay_ratio": 0.9}, 100, (20, 80)),
        ({"warmup_steps": 20, "decay_ratio": 0.9}, 10, (10, 0)),
    ],
)
def test_schedule(keys: dict[str, Any], steps: int, expected: tuple[int, int]) -> None:
    config = JobConfig.from_dict({"lr_scheduler": keys, "training": {"steps": steps}})
    assert (config.warmup_steps, config.decay_steps) == expected
    assert config.schedule_steps == keys.get("total_steps", steps)


def test_validation_follows_the_training_data_unless_set() -> None:
    training = {"dataset": "synthetic"}
    config = JobConfig.from_dict({"training": training})
    assert config.validation_dataset == "synthetic"
    config = JobConfig.from_dict(
        {"training": training, "validation": {"enable": True, "dataset": "digits"}}
    )
    assert config.validation_dataset == "digits"
    assert config.validation_dataset_path is None


def test_override_leaves_the_original_and_keeps_the_rest() -> None:
    config = JobConfig.from_dict({"model": {"dim": 64}, "training": {"steps": 7}})
    other = override(
        config, {"parallelism.tensor_parallel_degree": 2, "model.num_layers": 1, "model.dim": 32}
    )
    assert config.parallelism.tensor_parallel_degree == 1
    assert other.training.steps == 7
    assert make_model_config(other).dim == 32
    assert make_model_config(other).num_layers == 1
    # The warm-up is still a default, so it still shrinks to fit.
    assert other.warmup_steps == 7


def test_a_configuration_cannot_be_changed_and_travels_to_ranks() -> None:
    config = JobConfig.from_dict({"model": {"dim": 64}, "compile": {"components": ["model"]}})
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3  # type: ignore[misc]
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert make_model_config(copied).dim == 64


def test_whole_configuration_as_toml_is_the_same_job() -> None:
    config = parse_args(
        ["--training.steps=20", "--training.max_norm=inf", '--job.description=a "b"\n\\ \x85']
    )
    again = JobConfig.from_dict(parse_toml(format_config(config)))
    assert make_model_config(again) == make_model_config(config)
    assert again.warmup_steps == config.warmup_steps == 20
    assert override(again, {"model.name": config.model.name}).training == config.training
    assert again.job == config.job


def test_a_warm_up_that_is_cut_is_written_as_given() -> None:
    config = parse_args(["--training.steps=3", "--lr_scheduler.warmup_steps=30"])
    longer = override(
        JobConfig.from_dict(parse_toml(format_config(config))), {"training.steps": 40}
    )
    assert (config.warmup_steps, longer.warmup_steps) == (3, 30)


def test_a_run_that_goes_on_longer_prints_of_the_warm_up() -> None:
    short = parse_args(["--training.steps=3", "--lr_scheduler.warmup_steps=30"])
    longer = override(short, {"training.steps": 40})
    assert changed_keys(short.model_dump(mode="json", exclude_unset=True), longer) == [
        "training.steps 3 -> 40",
        "the warm-up 3 -> 30 steps",
    ]


def test_quoted_text_is_toml_on_one_line() -> None:
    for text in ['a"b', "a\\b", "a\nb", "\x00\x7f\u2028", "\U000e0001", "caf\xe9"]:
        assert parse_toml(f"x = {quote(text)}")["x"] == text
        assert quote(text).isprintable()


# --- models


def test_model_sizes_are_the_flavors_with_overrides() -> None:
    sizes = make_model_config(JobConfig.from_dict({"model": {"flavor": "debug", "num_layers": 3}}))
    assert (sizes.num_layers, sizes.num_heads, sizes.vocab_size) == (3, 8, 17)
    sizes = make_model_config(parse_args(["--model.num_kv_heads=2", "--model.norm_eps=1e-6"]))
    assert (sizes.kv_heads, sizes.norm_eps) == (2, 1e-6)
    sizes = make_model_config(
        parse_args(["--model.num_kv_heads=2", "--model.num_kv_heads=none", "--model.dim=64"])
    )
    assert (sizes.num_kv_heads, sizes.kv_heads, sizes.head_dim) == (None, 4, 16)


OWN_MODEL = """
from dataclasses import dataclass
from typing import Literal

from titanlite.models.spec import ModelSpec
from titanlite.registry import MODELS

@dataclass(frozen=True)
class Config:
    width: int = 8
    kinds: tuple[str, ...] = ("a",)
    rule: Literal["x", "y"] = "x"
    fast: bool = False
    vocab_size: int = 17
    image_height: int = 8
    image_width: int = 8
    image_channels: int = 1
    seq_len: int = 64

    num_parameters = 1

    def flops_per_token(self, seq_len):
        return 6

    def problems(self, dims, seq_len):
        wrong = self.width % dims.tp
        return [("model.width", f"{self.width} is odd; give an even one")] if wrong else []

FLAVORS = {"small": Config(), "large": Config(width=16)}
MODELS.add(ModelSpec("own", "own_model:Config", "own_model:M", "own_model:P"))
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that name a model in the working directory."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return ["--experimental.custom_import=own_model", "--model.name=own", "--model.flavor=small"]


def test_a_users_model_has_keys_of_its_own(own_model: list[str]) -> None:
    config = parse_args([*own_model, "--model.width=4", "--model.kinds=b,c", "--model.fast"])
    sizes = make_model_config(config)
    assert (sizes.width, sizes.kinds, sizes.fast, sizes.rule) == (4, ("b", "c"), True, "x")
    assert load_model_spec(config).name == "own"


def test_mistakes_in_a_users_model_are_told_the_same_way(own_model: list[str]) -> None:
    argv = [*own_model, "--model.widht=3", "--model.rule=z", "--model.kinds=[1]", "--model.dim=3"]
    with pytest.raises(ConfigError) as caught:
        parse_args(argv)
    assert caught.value.problems == (
        "model.widht: there is no such key; did you mean model.width?",
        'model.rule: "z" is not one of its values; give "x" or "y"',
        'model.kinds: 1 is an integer, not a string; write "1", with quotes',
        "model.dim: there is no such key; the keys of own are width, kinds, rule, fast, "
        "vocab_size, image_height, image_width, image_channels, seq_len",
    )
    with pytest.raises(ConfigError) as caught:
        parse_args([*own_model, "--model.width=3", "--parallelism.tensor_parallel_degree=2"])
    assert caught.value.problems == ("model.width: 3 is odd; give an even one",)


def test_help_lists_the_keys_of_a_users_model(
    own_model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args([*own_model, "--help", "model"])
    text = capsys.readouterr().out
    assert "  width  (the flavor's)" in text
    assert "num_heads" not in text


def test_a_model_that_fails_to_import_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--experimental.custom_import=broken_model"])
    assert caught.value.problems == (
        'experimental.custom_import: importing "broken_model" failed with RuntimeError '
        "(two lines); correct broken_model.py, line 1: raise RuntimeError('two\\nlines')",
    )


PACKAGE = {
    "__init__.py": "from own_package import parts\n",
    "parts.py": OWN_MODEL.replace("own_model:", "own_package.parts:"),
    "imports_parts.py": "import own_package.parts\n",
    "idle.py": "from titanlite import models\n",
}


def test_a_module_that_registers_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "own_package" / name).write_text(text)
    (tmp_path / "idle_module.py").write_text("from titanlite import models\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    imported = set(sys.modules)
    try:
        for module in ("os", "idle_module", "os"):
            with pytest.raises(ConfigError) as caught:
                parse_args([f"--experimental.custom_import={module}"])
            assert caught.value.problems == (
                f'experimental.custom_import: "{module}" registers no model and no data set; give '
                "a module that does (titanlite.register_model(...)), or remove this key",
            )
        own = ("--model.name=own", "--model.flavor=small")
        # The second time, and from inside the package, the import itself registers nothing.
        for module in ("own_package", "own_package", "own_package.parts"):
            parse_args([f"--experimental.custom_import={module}"])
            assert parse_args([f"--experimental.custom_import={module}", *own]).model.name == "own"
        # What it imports was imported before: the model of the job is there all the same.
        parse_args(["--experimental.custom_import=own_package.imports_parts", *own])
        with pytest.raises(ConfigError, match="registers no model"):
            parse_args(["--experimental.custom_import=own_package.idle"])
    finally:
        for name in set(sys.modules) - imported:
            if name.startswith(("own_package", "idle_module")):
                del sys.modules[name]


def test_a_name_is_registered_once() -> None:
    spec = MODELS["image_transformer"]
    MODELS.add(spec)
    with pytest.raises(ValueError, match="already registered"):
        MODELS.add(ModelSpec("image_transformer", "a:B", "a:C", "a:D"))
    with pytest.raises(KeyError):
        MODELS["no such model"]


def test_a_spec_that_names_nothing_is_one_line() -> None:
    MODELS.add(ModelSpec("hollow", "no_such_module:Config", "a:C", "a:D"))
    with pytest.raises(ConfigError) as caught:
        parse_args(["--model.name=hollow"])
    assert caught.value.problems == (
        'model.name: loading "no_such_module:Config" or its flavors failed with '
        "ModuleNotFoundError (No module named 'no_such_module'); "
        'correct the registration of "hollow"',
    )


# --- what a person is told


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_every_key_and_exits_with_0(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--training.steps=x", flag, "all"])  # a mistake does not keep help away
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    live = [key for key in job_keys().values() if key.is_live]
    for key in live:
        assert f"[{key.section}]" in text
        assert re.search(rf"^  {key.leaf} ", text, re.M), key.name
    assert "  steps = 10000                      number of optimizer steps (int >= 1)\n" in text
    assert '  dtype = "float32" ' in text
    assert '("float32" | "float64" | "bfloat16")' in text
    assert "  seq_len  (not set) " in text
    assert "  dim  (the flavor's)                width of the residual stream (int >= 1)\n" in text
    assert "expert_tensor_parallel_degree" not in text, "titanlite does not have it"
    with pytest.raises(SystemExit):
        parse_args([flag], needs_file="train jobs/a.toml")
    brief = capsys.readouterr().out.splitlines()
    assert brief[:2] == ["examples:", "  $ train jobs/a.toml"]
    assert len(brief) < 32
    assert {line.split()[0] for line in brief[10:]} == {key.section for key in live}
    with pytest.raises(SystemExit):
        parse_args([flag, "sampling.top_k"])
    assert capsys.readouterr().out.count("\n") == 3
    with pytest.raises(ConfigError, match=r"no section 'samplin'; did you mean sampling\?"):
        parse_args([flag, "samplin"])


def test_every_key_says_what_it_does() -> None:
    for key in job_keys().values():
        assert key.text, key.name
        assert "\n" not in key.text
        assert len(key.text) <= 90, key.name


def test_document_is_up_to_date() -> None:
    # In a process of its own: another test may have registered a model here.
    made = subprocess.run(
        [sys.executable, "-c", "import make_configuration as m; print(m.markdown(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (ROOT / "docs/configuration.md").read_text() == made, (
        "run: python docs/make_configuration.py"
    )
    for key in job_keys().values():
        assert f"`{key.leaf if key.is_live else key.name}`" in made


def test_reading_a_job_is_quick_and_imports_no_torch() -> None:
    script = (
        "import sys, time\n"
        "from titanlite.config import parse_args, resolve_job\n"
        "config = parse_args(['--parallelism.tensor_parallel_degree=2'])\n"
        "resolve_job(config, 4)\n"
        "try:\n    parse_args(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), time.process_time(), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy, _, seconds = done.stderr.strip().rpartition(" ")
    assert heavy == "[]"
    assert float(seconds) < 1.0  # about 0.25 on the slowest machine seen


def test_names_of_torchtitan_0_3_are_read(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    data = "dataloader.dataset = 'synthetic'"
    text = f"dump_folder = 'there'\n{data}\ndebug.print_config = true\n"
    file.write_text(f"{text}validator.freq = 7\nvalidator.{data}")
    keys = [f"--job.config_file={file}", "--profiler.profile_freq=3"]
    config = parse_args(keys)
    assert (config.job.dump_folder, config.job.print_config) == ("there", True)
    assert (config.validation.freq, config.validation.dataset) == (7, "synthetic")
    assert (config.training.dataset, config.profiling.profile_freq) == ("synthetic", 3)
    file.write_text("[profiling]\nprofile_freq = 2\n[profiler]\nprofile_freq = 3\n")
    with pytest.raises(
        ConfigError, match=r"profiling.profile_freq: is given here, and as profiler;"
    ):
        parse_args(keys[:1])
