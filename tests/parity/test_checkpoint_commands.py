"""Weights out of a checkpoint and into another, pictures from it, and the keys of [checkpoint]."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plans import checksums, config_of, make_job
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_train_script import png_size, run
from torch import Tensor

from titanlite import cli
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.manifest import MANIFEST, _digest, read_manifest
from titanlite.checkpoint.run import Checkpoints
from titanlite.checkpoint.storage import Piece, load, save, stored_tensors
from titanlite.config import JobConfig, override
from titanlite.config.changes import changed_keys, changed_sizes
from titanlite.errors import ConfigError, TitanliteError
from titanlite.ranks.launch import Place, spawn
from titanlite.tools.convert import command as convert
from titanlite.tools.convert.command import read_config
from titanlite.tools.convert.stored import find_checkpoint

STEPS = 4
TITANLITE = (sys.executable, "-m", "titanlite")


def config(plan: str, folder: Path, **keys: object) -> JobConfig:
    """A job of few steps; `checkpoint__interval=2` for checkpoint.interval."""
    changes = {
        "training.steps": STEPS,
        "lr_scheduler.total_steps": STEPS + 1,
        "sampling.num_samples": 2,
    }
    changes |= {name.replace("__", "."): value for name, value in keys.items()}
    return override(config_of(plan, folder), changes)


def go(place: Place, configs: list[JobConfig]) -> list[tuple[int, list[str], dict[str, str], dict]]:
    """Each run to its end: its first step, what it said, and its state and weights at the end."""
    from titanlite.ranks.world import open_world

    results = []
    with open_world(place) as world:
        for config in configs:
            job = make_job(config, world)
            with Checkpoints(job) as checkpoints:
                said = list(checkpoints.notes)
                if checkpoints.is_seed:
                    said.append(checkpoints.save(0))
                else:
                    for step in range(checkpoints.first_step, config.training.steps + 1):
                        job.step(step)
                        is_last = step == config.training.steps
                        said.append(checkpoints.after_step(step, is_last=is_last))
            weights = {name: whole.clone() for name, whole in job.whole_parameters()}
            results.append((checkpoints.first_step, said, checksums(job), weights))
    return results


def one(plan: str, num_ranks: int, folder: Path, **keys: object):
    """The same of one run."""
    return spawn(go, num_ranks, [config(plan, folder, **keys)])[0][0]


def titanlite(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose last checkpoint holds the weights alone, and the one before everything."""
    folder = tmp_path_factory.mktemp("trained")
    *_, weights = one("pp2", 2, folder, checkpoint__interval=3)
    return folder / "checkpoint", weights


def test_to_safetensors_and_back(tmp_path, trained, capsys):
    checkpoints, weights = trained
    file = tmp_path / "model.safetensors"
    assert titanlite("convert", checkpoints, "--out", file) == 0
    assert f"{sum(w.numel() for w in weights.values()):,} parameters" in capsys.readouterr().out
    found = load_file(file)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        # As checkpoint.export_dtype has it.
        assert torch.equal(found[name], weight.float()), name
    half = tmp_path / "half.safetensors"
    assert titanlite("convert", checkpoints / "step-3", "--out", half, "--dtype", "bfloat16") == 0
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(half).values())
    assert titanlite("convert", file, "--out", tmp_path / "back") == 0
    again = tmp_path / "again.safetensors"
    assert titanlite("convert", tmp_path / "back", "--out", again) == 0
    back = load_file(again)
    assert all(torch.equal(back[name], tensor) for name, tensor in found.items())
    assert read_config(again) == read_config(file)
    assert titanlite("convert", file, "--out", again) == 2
    assert "one of source and --out must be a .safetensors file" in capsys.readouterr().err
    assert titanlite("convert", checkpoints, "--out", again) == 2
    assert "again.safetensors exists already" in capsys.readouterr().err
    # Of 8 images a step, by two at once, three ranks could not train.
    assert titanlite("sample", file, "--out", tmp_path / "grid.png", "--ranks", 3) == 0
    assert png_size(tmp_path / "grid.png")[0] > 200
    capsys.readouterr()
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    more = {f"layers.{number}.w1.weight": torch.zeros(1) for number in range(7, 12)}
    whole_numbers = {name: tensor.int() for name, tensor in found.items()}
    for tensors, said in (
        (
            found | more,
            "unexpected keys: layers.10.w1.weight, layers.11.w1.weight, layers.7.w1.weight and 2 ",
        ),
        (whole_numbers, "is int32, and float64 in the model; give floating-point weights"),
        ({"norm.weight": found["norm.weight"]}, " more; give the weights of this model"),
    ):
        save_file(tensors, altered := tmp_path / "altered.safetensors", metadata)
        assert titanlite("sample", altered, "--out", tmp_path / "none.png") == 2
        assert said in capsys.readouterr().err
    assert titanlite("convert", tmp_path, "--out", tmp_path / "x.safetensors") == 2
    assert "is neither a checkpoint nor a folder of them" in capsys.readouterr().err


def test_what_cannot_be_written_is_one_line_and_nothing_is_left_or_lost(
    tmp_path, trained, capsys, monkeypatch
):
    checkpoints, _ = trained
    file = tmp_path / "model.safetensors"
    own = [tmp_path / "model.safetensors.new", tmp_path / "step-7.new" / "keep.txt"]
    own[1].parent.mkdir()
    for path in own:
        path.write_text("the user's")
    assert titanlite("convert", checkpoints, "--out", file) == 0
    for source, out in ((checkpoints, file / "x.safetensors"), (file, file / "x")):
        capsys.readouterr()
        assert titanlite("convert", source, "--out", out) == 2
        said = f"titanlite convert: --out: writing {out} failed: Not a directory\n"
        assert capsys.readouterr().err == said

    def write(self: object, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("titanlite.checkpoint.storage._HashingFile.write", write)
        assert titanlite("convert", file, "--out", tmp_path / "step-7") == 2
    assert capsys.readouterr().err.endswith("step-7 failed: No space left on device\n")
    assert sorted(tmp_path.iterdir()) == sorted([file, own[0], own[1].parent])
    assert titanlite("convert", file, "--out", tmp_path / "step-7") == 0
    assert find_checkpoint(tmp_path)[1].step == 7
    assert [path.read_text() for path in own] == ["the user's"] * 2


def reseal(folder: Path, **changes: object) -> None:
    """Change values of a checkpoint's manifest, and its checksum with them."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    del content["sha256"]
    (folder / MANIFEST).write_text(json.dumps({"sha256": _digest(content), **content}))


EVIL = "from pathlib import Path\nPath({mark!r}).touch()\nraise RuntimeError('it ran')\n"


@pytest.fixture
def evil(tmp_path, trained, monkeypatch):
    """A checkpoint that names a module, which lies beside it, and the mark that module leaves."""
    folder = tmp_path / "step-4"
    shutil.copytree(trained[0] / "step-4", folder)
    mark = tmp_path / "it-ran"
    for place in (folder, tmp_path):
        (place / "evil_model.py").write_text(EVIL.format(mark=str(mark)))
    config = read_manifest(folder).config
    reseal(folder, config={**config, "experimental": {"custom_import": "evil_model"}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder, mark
    sys.modules.pop("evil_model", None)


def test_what_a_checkpoint_names_is_imported_for_the_user_alone(
    evil, tmp_path, capsys, monkeypatch
):
    folder, mark = evil
    path = list(sys.path)
    said = (
        'experimental.custom_import: {} names a module that registers the model, "evil_model", '
        "which is not used without your consent; if you trust it, give "
        "--experimental.custom_import=evil_model\n"
    )
    file = tmp_path / "model.safetensors"
    assert titanlite("convert", folder, "--out", file) == 0
    assert titanlite("convert", file, "--out", tmp_path / "step-9") == 0
    capsys.readouterr()
    for place in (folder, file, tmp_path / "step-9"):
        # From where the module could be imported, too.
        for here in (tmp_path, folder):
            monkeypatch.chdir(here)
            assert titanlite("sample", place, "--out", tmp_path / "x.png") == 2
            assert capsys.readouterr().err == f"titanlite sample: {said.format(place)}"
    config = override(config_of("single", tmp_path), {})
    assert changed_sizes(read_manifest(folder).config, config) == []
    changed_keys(read_manifest(folder).config, config)
    assert (mark.exists(), "evil_model" in sys.modules, sys.path) == (False, False, path)
    # What the user names is imported.
    (tmp_path / "job.toml").write_text('[experimental]\ncustom_import = "evil_model"\n')
    monkeypatch.chdir(tmp_path)
    words = ("sample", folder, "--out", tmp_path / "x.png", "--num-samples", 1)
    for given in ("--job.config_file=job.toml", "--experimental.custom_import=evil_model"):
        assert titanlite(*words, given) == 2
        assert 'importing "evil_model" failed with RuntimeError (it ran)' in capsys.readouterr().err
        mark.unlink()


def deep(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"a": value}
    return value


WRONG_CONFIGS = [
    ({"model": {"num_layers": 10**12}}, "parameters; give another checkpoint"),
    ({"model": {"image_height": 10**7, "image_width": 10**7}}, " but its [model] has "),
    ({"model": {"name": "llama4"}}, 'model.name: "llama4" is a TorchTitan model'),
    ({"model": {"num_heads": "8"}}, "model.num_heads: "),
    ({"model": {"\x1b[2J": 1}}, "model."),
    ({"model": deep(300)}, "model.a: "),
    ({"training": {"dtype": "int8"}}, "training.dtype: "),
    ({"sampling": {"num_samples": 10**12}}, "asks for 1,000,000,000,000; give a number"),
    (
        {"training": {"dataset": "cifar10", "dataset_path": "/tmp/x; rm -r ~"}},
        "training.dataset_path: ",
    ),
    ({"experimental": {"custom_import": "os; import evil"}}, "give --experimental.custom_import\n"),
    ({"experimental": {"custom_import": ["evil"]}}, "give --experimental.custom_import\n"),
]


def test_a_configuration_of_wrong_values_is_one_line(evil, tmp_path, capsys):
    folder, mark = evil
    model = read_manifest(folder).config["model"]
    for changes, said in WRONG_CONFIGS:
        config = {"model": model, **changes}
        reseal(folder, config={**config, "model": {**model, **config["model"]}})
        assert titanlite("sample", folder, "--out", tmp_path / "x.png") == 2, changes
        line = capsys.readouterr().err
        assert line.startswith("titanlite sample: "), line
        assert said in line
        assert len(line.splitlines()) == 1, line
        assert line[:-1].isprintable()
    assert not mark.exists()


def test_a_safetensors_file_of_wrong_content_is_one_line(tmp_path, capsys):
    file, tensors = tmp_path / "a.safetensors", {"a": torch.zeros(1)}
    odd = {"a\x1b[2J\nb": torch.zeros(1)}

    def save(config: str, of: dict = tensors) -> Callable[[], None]:
        return lambda: save_file(of, file, {"titanlite.config": config})

    cases: list[tuple[Callable[[], object], str, str]] = [
        (save("{"), "sample", "that is not a configuration"),
        (save("[]"), "sample", "that is not a configuration"),
        (save('{"model": 1}'), "sample", "that is not a configuration"),
        (save("[" * 10**5), "convert", "that is not a configuration"),
        (save("{}", {}), "convert", "has no tensors"),
        (
            save("{}", odd),
            "convert",
            r"cannot be converted to a checkpoint: shapes.a\x1b[2J\nb: has characters",
        ),
        (save('{"model": {"flavor": "debug"}}', odd), "sample", r"unexpected keys: a\x1b[2J\nb;"),
        (lambda: file.write_bytes(b"\xff" * 100), "sample", "cannot be read"),
        (lambda: file.write_bytes(b""), "convert", "cannot be read"),
        (lambda: os.mkfifo(file), "sample", "is neither a .safetensors file"),
        (lambda: (file.mkdir(), os.mkfifo(file / "b.safetensors")), "convert", "is a pipe"),
        (lambda: (file.mkdir(), (file / "b.safetensors").mkdir()), "sample", "is a folder"),
    ]
    for make, command, said in cases:
        make()
        assert titanlite(command, file, "--out", tmp_path / "out" / "x") == 2
        line = capsys.readouterr().err
        assert said in line
        assert len(line.splitlines()) == 1, line
        shutil.rmtree(file) if file.is_dir() else file.unlink()


@pytest.mark.parametrize(
    ("option", "number"), [("--num-samples", 0), ("--ranks", -1), ("--ranks", 0)]
)
def test_too_few_images_or_ranks(tmp_path, option, number, capsys):
    assert titanlite("sample", tmp_path, "--out", tmp_path / "x.png", option, number) == 2
    said = f"titanlite sample: {option}: {number} is less than 1\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_says_so(number, monkeypatch, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(convert, "main", lambda arguments: signal.raise_signal(number))
    try:
        assert titanlite("convert") == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == f"stopped by {number.name}\n"


def go_or_say(place: Place, runs: list[tuple[Path, dict]]) -> list[tuple[int, list[str]]]:
    """The first step of each run and what it said; 0 and the line where it is refused."""
    from titanlite.checkpoint import folder as folders

    folders.PATIENCE_SECONDS = 0
    results = []
    for folder, keys in runs:
        try:
            ((first, said, *_),) = go(place, [config("single", folder, **keys)])
        except TitanliteError as error:
            first, said = 0, [str(error)]
        results.append((first, said))
    return results


def altered(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """A checkpoint with other tensors, whole by its checksums, of a run on one rank."""
    tensors = {
        name: torch.zeros(shape, dtype=d) for name, (shape, d) in stored_tensors(source).items()
    }
    load({name: Piece.whole(tensor) for name, tensor in tensors.items()}, source, None)
    change(tensors)
    records: dict = {}
    save({n: Piece.whole(t) for n, t in tensors.items()}, folder, None, records.update)
    shutil.copy(source / MANIFEST, folder)
    files = {name: record.model_dump() for name, record in records.items()}
    reseal(folder, files=files, plan="one rank", num_ranks=1)


FIRST = "norm.weight"
WRONG_TENSORS = [
    (
        lambda t: t.pop(f"optimizer.{FIRST}.exp_avg"),
        f"the state of {FIRST} is not that of AdamW (step, exp_avg, exp_avg_sq)",
    ),
    (
        lambda t: t.update({f"optimizer.{FIRST}.more": torch.zeros(())}),
        f"the state of {FIRST} is not that of AdamW",
    ),
    (
        lambda t: t.update({f"optimizer.{FIRST}.exp_avg": t[f"optimizer.{FIRST}.exp_avg"].float()}),
        f"optimizer.{FIRST}.exp_avg has dtype torch.float32",
    ),
    (lambda t: t[f"optimizer.{FIRST}.step"].fill_(-5), "a step count of the optimizer is negative"),
    (lambda t: t[f"optimizer.{FIRST}.step"].fill_(float("nan")), "is negative or not finite"),
    (lambda t: t.pop(f"model.{FIRST}"), f"Missing key in checkpoint state_dict: model.{FIRST}."),
    (lambda t: t.update({f"model.{FIRST}": torch.zeros(1)}), "Size mismatch between saved"),
    (
        lambda t: t.update({f"model.{FIRST}": t[f"model.{FIRST}"].int()}),
        f"model.{FIRST} has dtype torch.int32, not torch.float64",
    ),
]


def test_tensors_that_are_not_the_state_of_the_job_are_one_line(tmp_path, trained):
    for number, (change, _) in enumerate(WRONG_TENSORS):
        altered(trained[0] / "step-3", tmp_path / f"{number}" / "checkpoint" / "step-3", change)
    runs = [(tmp_path / str(number), {}) for number in range(len(WRONG_TENSORS))]
    results = spawn(go_or_say, 1, runs)[0]
    for (first, said), (_, expected) in zip(results, WRONG_TENSORS, strict=True):
        assert first == 0, expected
        assert expected in said[0]
        assert len(said[0].splitlines()) == 1, said[0]


def test_what_is_left_can_be_gone_on_from_with_the_same_model(tmp_path):
    longer = {"training__steps": 3, "lr_scheduler__total_steps": 3, "checkpoint__load_only": True}
    # It changes no shape.
    heads = {"model__num_heads": 4}
    source = {"checkpoint__initial_load_path": str(tmp_path / "a" / "checkpoint" / "step-2")}
    saves = {"training__steps": 2, "checkpoint__keep_latest_k": 1}
    behind = saves | {"checkpoint__interval": 1, "checkpoint__async_mode": "async"}
    wild = saves | {"checkpoint__interval": 1, "optimizer__lr": 1e200, "optimizer__name": "SGD"}
    runs = [
        (tmp_path / "a", {**saves, "checkpoint__interval": 1}),
        (tmp_path / "a", longer),
        (tmp_path / "a", longer | heads),
        (tmp_path / "new", longer | heads | source),
        (tmp_path / "b", saves),
        (tmp_path / "b", longer),
        (tmp_path / "behind", behind),
        (tmp_path / "held", saves),
        (tmp_path / "wild", wild),
        (tmp_path / "wild", wild),
    ]
    held = CheckpointFolder(tmp_path / "held" / "checkpoint")
    held.path.mkdir(parents=True)
    with held.holding():
        results = spawn(go_or_say, 1, runs)[0]
    _, again, refused, new, _, without, asynchronous, beside, blown, spoilt = results
    assert {path.name for path in (tmp_path / "a" / "checkpoint").iterdir()} == {"step-1", "step-2"}
    assert again[0] == 2
    assert again[1][1] == "checkpoint: resuming from step-1 instead, saved with one rank"
    assert refused[0] == 0
    assert "step-1 is from another model: model.num_heads 8 -> 4; give the [model]" in refused[1][0]
    assert new[0] == 1
    assert new[1][1] == "checkpoint: changed since it was saved: model.num_heads 8 -> 4"
    assert "can be used (step-2 cannot be used: it holds only weights)" in without[1][0]
    assert "initial_load_path can load the weights of step-2" in without[1][0]
    lines = "\n".join(asynchronous[1]).splitlines()
    assert [line.split(" in ")[0].split(";")[0].split(",")[0] for line in lines[1:]] == [
        "checkpoint: saving step-1",
        "checkpoint: step-1 saved",
        "checkpoint: step-2 saved",
    ]
    assert "another run is using" in beside[1][0]
    assert blown[1][0].startswith("step 2: loss ")
    assert "may be bad" not in blown[1][0]
    assert f"this is the first step from {tmp_path}/wild/checkpoint/step-1, whose" in spoilt[1][0]


@pytest.mark.slow
def test_pictures_are_the_same_on_any_number_of_ranks(tmp_path, trained, capsys):
    checkpoints, _ = trained
    assert titanlite("sample", checkpoints, "--out", tmp_path / "two.png", "--ranks", 2) == 0
    assert "2 images from" in capsys.readouterr().out
    done = run(
        [
            sys.executable,
            "-m",
            "titanlite",
            "sample",
            str(checkpoints / f"step-{STEPS}"),
            "--out",
            str(tmp_path / "one.png"),
        ]
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert png_size(tmp_path / "one.png")[0] > 200
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert titanlite("sample", tmp_path / "other.safetensors", "--out", tmp_path / "x.png") == 2
    assert "has no configuration of its model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_has_ended_stays_ended_and_a_longer_one_goes_on(tmp_path, trained):
    checkpoints, weights = trained
    first, said, _, again = one("pp2", 2, checkpoints.parent, checkpoint__load_only=True)
    assert first == STEPS + 1
    assert said[0] == f"checkpoint: step-{STEPS} is the last step of this run"
    assert all(
        torch.equal(again[name], weight.float().double()) for name, weight in weights.items()
    )
    first, said, *_ = one(
        "pp2", 2, checkpoints.parent, checkpoint__load_only=True, training__steps=STEPS + 1
    )
    assert first == 4
    assert said[:2] == [
        f"checkpoint: step-{STEPS} cannot be used: it holds only weights",
        "checkpoint: resuming from step-3 instead, saved with pp 2",
    ]
    assert said[2] == "checkpoint: changed since it was saved: training.steps 4 -> 5"


@pytest.mark.slow
def test_safetensors_at_the_end_start_a_run_under_another_plan(tmp_path):
    *_, weights = one("tp2", 2, tmp_path / "a", checkpoint__last_save_in_hf=True)
    source = tmp_path / "a" / "checkpoint" / f"step-{STEPS}"
    assert {path.name for path in source.iterdir()} == {"model.safetensors", "manifest.json"}
    first, said, _, loaded = one(
        "cp2",
        2,
        tmp_path / "b",
        training__steps=1,
        optimizer__lr=1e-30,
        optimizer__weight_decay=0.0,
        checkpoint__initial_load_path=str(source),
        checkpoint__initial_load_in_hf=True,
    )
    assert first == 1
    assert said[0] == f"checkpoint: starting a new run from the weights in {source}"
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.float().double()), name


@pytest.mark.slow
def test_a_seed_checkpoint_starts_every_plan_alike(tmp_path):
    first, said, _seed, weights = one(
        "single", 1, tmp_path / "a", checkpoint__create_seed_checkpoint=True
    )
    assert (first, find_checkpoint(tmp_path / "a" / "checkpoint")[1].step) == (1, 0)
    first, said, _, started = one(
        "fsdp4",
        4,
        tmp_path / "b",
        training__steps=1,
        debug__seed=7,
        optimizer__lr=1e-30,
        optimizer__weight_decay=0.0,
        checkpoint__initial_load_path=str(tmp_path / "a" / "checkpoint" / "step-0"),
    )
    assert said[0].startswith("checkpoint: starting a new run from the weights in ")
    for name, weight in weights.items():
        assert torch.equal(started[name], weight), name


@pytest.mark.slow
def test_which_step_and_which_parts_are_loaded(tmp_path):
    keys = {"checkpoint__interval": 1, "checkpoint__last_save_model_only": False}
    one("single", 1, tmp_path, **keys)

    def load(**more: object):
        return one("single", 1, tmp_path, checkpoint__load_only=True, training__steps=1, **more)

    first, said, state, _ = load(checkpoint__load_step=2)
    assert first == 3
    assert said[0] == "checkpoint: resuming from step-2, saved with one rank"
    assert (state["steps"], state["numbers"]) == ("[2.0]", "2 16")
    left_out = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    first, *_ = load(checkpoint__exclude_from_loading=("train_state",), checkpoint__load_step=2)
    assert first == 1
    first, _, state, _ = load(
        checkpoint__exclude_from_loading=left_out[:3], checkpoint__load_step=2
    )
    assert (first, state["steps"], state["numbers"]) == (3, "[]", "0 0")
    for changes, line in (
        (
            {"checkpoint__load_step": 9},
            r"checkpoint\.load_step: there is no step-9 in .* 1, 2, 3, 4",
        ),
        ({"training__dtype": "float32"}, r"training\.dtype: .* is in float64; use that"),
        ({"optimizer__name": "SGD"}, r"optimizer\.name: the checkpoint has the state of AdamW"),
    ):
        with pytest.raises(ConfigError, match=line):
            load(**changes)
