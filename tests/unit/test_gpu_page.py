"""docs/gpu.md shows what docs/gpu_checks.py has measured, and its checks are commands that work."""

import json
from pathlib import Path

import gpu_checks

from titanlite.config import JobConfig, read_job


def figures(name: str) -> dict:
    return json.loads((gpu_checks.EVIDENCE / name).read_text())


def test_the_table_is_that_of_the_files() -> None:
    page = (gpu_checks.ROOT / "docs/gpu.md").read_text()
    plan, again, found = map(figures, ("planned.json", "planned_again.json", "measured.json"))
    assert gpu_checks.table({"before": plan, "mended": again}, found) in page


def test_every_plan_is_checked_and_the_jobs_are_right(tmp_path: Path) -> None:
    checks = list(gpu_checks.checks(tmp_path, 4))
    names = [check.name for check in checks]
    assert "tp4, ranks as threads" in names
    assert "tp4, 4 GPUs" in names
    assert "pp2_tp2_fsdp2, 4 GPUs" not in names  # it has eight ranks
    for check in checks:
        if check.group == "train":
            read_job([*check.command[2:], "--job.device=cpu"]).require()
    several = list(gpu_checks.several(tmp_path, 8))
    assert [check.name for check in several][:3] == [f"NCCL, {n} ranks" for n in (2, 4, 8)]
    for check in several[3:]:
        read_job([*check.command[4:], "--job.device=cpu"]).require()
    for changes in gpu_checks.MEASURES.values():
        JobConfig.from_dict(gpu_checks.job_of(changes, tmp_path))


def test_a_check_keeps_its_status_and_its_log(tmp_path: Path) -> None:
    cores: gpu_checks.Queue[set[int]] = gpu_checks.Queue()
    cores.put({min(gpu_checks.os.sched_getaffinity(0))})
    command = [gpu_checks.sys.executable, "-c", "print('1 passed'); raise SystemExit(3)"]
    check = gpu_checks.Check("kernels", "one", command)
    done = gpu_checks.run(check, tmp_path, cores)
    assert (done.status, done.shown) == (3, "1 passed")
    assert (tmp_path / "logs/kernels_one.txt").read_text() == "1 passed\n"
