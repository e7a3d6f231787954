"""The files that a command is asked for are written, even if nobody reads what it prints."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite import cli


class Closed(io.StringIO):
    """The output of `titanlite ... | head`, after head has ended."""

    def write(self, _: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def run(command: str, *arguments: object) -> None:
    """A command whose output nobody reads: it ends as one that SIGPIPE has ended."""
    with contextlib.redirect_stdout(Closed()), pytest.raises(SystemExit) as ended:
        cli.main([command, *map(str, arguments)])
    assert ended.value.code == 141


def files(folder: Path, *names: str) -> dict[str, Path]:
    """Options and their files: "--html" and page.html, for "html"."""
    return {f"--{name}": folder / f"out.{name}" for name in names}


def flat(options: dict[str, Path]) -> list[object]:
    return [word for option, path in options.items() for word in (option, path)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nflavor = "debug"\n[training]\ndataset = "synthetic"\nglobal_batch_size = 8\n'
        'local_batch_size = 4\n[job]\ndevice = "cuda"\n'
    )
    return path


def test_a_plan(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SimpleNamespace(notes=[], advice=[], dims=None)
    for name, stand_in in {
        "plan_job": lambda *_, **__: plan,
        **{name: lambda *_, **__: "text" for name in ("draw_page", "draw_schedules", "make_trace")},
        **{name: lambda *_, **__: "text" for name in ("_first_screen", "show", "figures")},
        **{name: lambda *_: [] for name in ("step_spans", "make_timeline", "advise")},
        "step_in_words": lambda _: "text",
    }.items():
        monkeypatch.setattr(f"titanlite.tools.planner.command.{name}", stand_in)
    asked = files(tmp_path, "json", "html", "trace", "svg")
    pipeline = "--parallelism.pipeline_parallel_degree=2"
    run("plan", job, pipeline, "--hardware", "a100", *flat(asked))
    assert all(path.stat().st_size for path in asked.values())


def test_a_search(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = SimpleNamespace(changes={"training.local_batch_size": 2})
    found = SimpleNamespace(best=[best], failures=())
    monkeypatch.setattr("titanlite.tools.planner.search_report.run_search", lambda *_, **__: found)
    monkeypatch.setattr("titanlite.tools.planner.search_report.show_search", lambda *_: "text")
    monkeypatch.setattr("titanlite.tools.planner.search_report.search_figures", lambda *_: {})
    monkeypatch.setattr("titanlite.tools.planner.command.draw_page", lambda **_: "text")
    asked = files(tmp_path, "json", "html", "best")
    run("plan", job, "--search", "--ranks", 2, "--hardware", "a100", *flat(asked))
    assert all(path.stat().st_size for path in asked.values())
    assert "local_batch_size = 2" in asked["--best"].read_text()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("1F1B", "--weight-units", 1, "--memory", "memory.svg"), ("svg", "html", "csv")),
        (("1F1B", "--sweep", "workers=2,4"), ("csv", "svg")),
        (("ladder", "--items", 4), ("svg", "html")),
    ],
)
def test_a_simulation(
    arguments: tuple[object, ...],
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = files(tmp_path, *names)
    run("simulate", *arguments, *flat(asked))
    assert all(path.stat().st_size for path in asked.values())
    assert Path("memory.svg").exists() == ("--memory" in arguments)


def test_a_verification(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(agrees=True, error=None, ran=lambda *_: {"config": ""})

    class Verifier(contextlib.nullcontext):
        def verify(self, *_: Any, on_start: Any, **__: Any) -> Any:
            on_start(found)
            return found

    monkeypatch.setattr(
        "titanlite.tools.verify.verify.Verifier", lambda *_, **__: Verifier(Verifier())
    )
    for name in ("format_header", "format_verification"):
        monkeypatch.setattr(f"titanlite.tools.verify.report.{name}", lambda *_: "text")
    monkeypatch.setattr("titanlite.tools.verify.report.to_json", lambda *_: {"agrees": True})
    asked = files(tmp_path, "json")
    run("verify", job, "--job.device=cpu", *flat(asked))
    assert asked["--json"].read_text() == '{\n "agrees": true\n}\n'


def test_the_picture_of_an_exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "shift.py"
    own.write_text("def shift(device):\n    pass\n")
    verdict = SimpleNamespace(
        is_passed=True,
        kind="right",
        lines=["a line"],
        record=SimpleNamespace(svg=lambda title: f"<svg>{title}"),
    )
    monkeypatch.setattr("titanlite.tools.lab.cluster.VirtualCluster", contextlib.nullcontext)
    monkeypatch.setattr("titanlite.tools.lab.exercises.judge.judge", lambda *_: verdict)
    run("lab", "exercise", "shift", own, "--picture", tmp_path / "picture.svg")
    assert "<svg>" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_sample(num_samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of one sample is printed while it is sampled."""
    from titanlite.ranks.launch import ALONE
    from titanlite.tools.sample import command

    def sample(_: Any, number: int, *, on_new: Any) -> list[list[int]]:
        for token in (1, 2, 3):
            on_new(token)
        return [[1, 2, 3]] * number

    class Writer:
        def add(self, token: int = 0) -> None:
            print(token, flush=True)

        close = add

    world = SimpleNamespace(is_first=True)
    data = SimpleNamespace(tokenizer="its", texts=lambda samples: ["text"] * len(samples))
    for name, stand_in in {
        "titanlite.ranks.world.open_world": lambda *_, **__: contextlib.nullcontext(world),
        "titanlite.job.build_job": lambda *_: SimpleNamespace(data=data),
        "titanlite.checkpoint.group.CheckpointGroup": lambda *_: SimpleNamespace(
            with_long_timeout=contextlib.nullcontext
        ),
        "titanlite.checkpoint.weights.load_safetensors": lambda *_: None,
        "titanlite.tools.sample.generate.TextWriter": lambda *_: Writer(),
        "titanlite.tools.sample.generate.sample_sequences": sample,
        "titanlite.tools.sample.generate.save_samples": lambda _, samples, out: out.write_text(
            "saved"
        ),
    }.items():
        monkeypatch.setattr(name, stand_in)
    sampling = SimpleNamespace(num_samples=num_samples, prompt="")
    comm = SimpleNamespace(checkpoint_timeout_seconds=1)
    config = SimpleNamespace(sampling=sampling, comm=comm)
    resolved: Any = SimpleNamespace(config=config, dims=SimpleNamespace(describe_place=str))
    out = tmp_path / "out.txt"
    with contextlib.redirect_stdout(Closed()), pytest.raises(BrokenPipeError):
        command.draw(ALONE, resolved, "cpu", tmp_path, None, out)
    assert out.read_text() == "saved"
