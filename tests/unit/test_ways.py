"""How far a reader walks: from a job to its parallel model, to its plan, and through `verify`."""

from collections import Counter
from pathlib import Path

import pytest
from ways import Way, recorded

from titanlite.tools.planner.command import main as plan

# Fewer blocks have the same way.
JOB = (str(Path(__file__).parents[2] / "configs/tp2_fsdp2.toml"), "--model.num_layers=1")


@pytest.fixture(scope="module")
def planned() -> Way:
    """The planner builds the job as a run does, in this process."""
    with recorded() as way:
        assert plan([*JOB, "--activation_checkpoint.mode=full"]) == 0
    return way


def test_from_a_job_to_its_parallel_model(planned: Way) -> None:
    way = planned.files(to=("apply_", "ImageTransformer.__init__"))
    way = [file for file in way if "/tools/" not in file]
    assert way[:3] == ["titanlite/job.py", "titanlite/plain_job.py", "titanlite/models/build.py"]
    assert "titanlite/parallelize/fsdp/apply.py" in way
    assert len(set(way)) <= 15, way
    assert len(way) - len(set(way)) <= 8, way


def test_from_a_job_to_its_plan(planned: Way) -> None:
    way = planned.files(inside="titanlite/tools/planner/")
    assert "titanlite/tools/planner/recorder.py" in way
    assert len(set(way)) <= 15, way


def test_through_verify(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the launcher's side: no file is entered more than four times."""
    from titanlite.tools.verify.command import main as verify

    with recorded() as way:
        assert verify([*JOB, "--steps=1"]) == 0
    files = way.files(inside="titanlite/tools/verify/")
    assert "AGREES" in capsys.readouterr().out
    assert max(Counter(files).values()) <= 4, Counter(files)
