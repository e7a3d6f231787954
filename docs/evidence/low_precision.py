"""Verify in bfloat16 under three tolerances: how many bugs each misses, and its false alarms.

    python docs/evidence/low_precision.py bugs|mutants|plans [--every N] [--json FILE]
    python docs/evidence/low_precision.py table FILE ...

Each case is run once. Its differences are then compared with a fixed tolerance: that of
torch.testing.assert_close in bfloat16, or 0.1; with ten times the rounding error of the reference,
the default of verify; and with the sensitivity of the reference. Of the recorded bugs, of the
mutants and of NUM_PLANS plans of `verify --matrix`, on four ranks and then on eight, every N-th is
taken. What is found whatever the tolerance is counted apart: a start or replicas that differ, a run
that fails, a batch in parts that differs in float64.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIXED, LARGER = 1.6e-2, 0.1
TOLERANCES = ("fixed", "rounding", "sensitivity")
SECONDS = 400
NUM_PLANS = 30


def worst_of(verifier: Any, config: Any, steps: int, patch: Any = None) -> dict[str, float]:
    """For each tolerance, the largest difference of a job divided by it; infinite for "always"."""
    from titanlite.config import resolve_job
    from titanlite.tools.verify.accumulation import measure_rounding, measure_sensitivity
    from titanlite.tools.verify.differences import Tolerance, badness, differences, unequal_replicas
    from titanlite.tools.verify.jobs import JobRun, plan_job, reference_job
    from titanlite.tools.verify.result import Verification
    from titanlite.tools.verify.sensitivity import Given, Sensitivity

    plan = plan_job(resolve_job(config), "bfloat16")
    verifier.pool(plan.dims.world_size).start()
    run = JobRun(plan, steps, patch)
    reference, runs, error = verifier._runs.run_both(run, reference_job(plan), is_beside=False)
    always = dict.fromkeys((*TOLERANCES, "always"), math.inf)
    if error is not None:
        return always
    if unequal_replicas(runs) or any(run.problems for run in runs) or reference.problems:
        return always
    if verifier._accumulation.problem(plan, steps):
        return always
    found = Verification(plan, "bfloat16", steps, 1)
    rounding = measure_rounding(verifier._runs, found, reference)
    sensitivity = measure_sensitivity(verifier._runs, found, reference)
    judged = {
        "fixed": (Given(dtype="bfloat16", limit=FIXED), False),
        "rounding": (Tolerance("bfloat16", rounding), False),
        "sensitivity": (Sensitivity("bfloat16", sensitivity), True),
    }
    worst = {"always": 0.0}
    for name, (tolerance, by_distance) in judged.items():
        measured = differences(runs, reference.steps, by_distance=by_distance)
        if any(measured[0].values()):
            return always
        by_kind: dict[str, tuple[float, str]] = {}
        for step, of_step in enumerate(measured):
            for key, value in of_step.items():
                bad = badness(value, tolerance.of(step, key))
                by_kind[key[0]] = max(by_kind.get(key[0], (0.0, "")), (bad, f"{key[1]} {step}"))
        worst[name] = max(bad for bad, _ in by_kind.values())
        worst |= {f"{name} {kind}": bad for kind, (bad, _) in by_kind.items() if bad}
    return worst


def bugs() -> Iterator[tuple[str, Any]]:
    """The recorded bugs; each returns its worst differences."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/parity")]
    import test_verify_bugs as recorded

    from titanlite.tools.verify.verify import Verifier

    with Verifier(threads=True) as verifier:
        for case in recorded.CASES:
            config = recorded.config_of(case)
            name = f"{recorded.name_of(case)} {config.parallelism}"[:100]
            yield (
                name,
                lambda c=config, p=case.patch, s=case.steps: worst_of(verifier, c, max(2, s), p),
            )


def plans() -> Iterator[tuple[str, Any]]:
    """Correct plans."""
    from titanlite.tools.verify.matrix import job_of, plans_of
    from titanlite.tools.verify.verify import Verifier

    with Verifier(threads=True) as verifier:
        every = [*plans_of(4), *plans_of(8)]
        for choice in [c for c in every if c.get("float8", "off") in ("off", "-")][:NUM_PLANS]:
            config = job_of(choice)
            name = ", ".join(f"{k} {v}" for k, v in choice.items() if v not in (1, "-", "off"))
            yield name, lambda c=config: worst_of(verifier, c, 2)


def mutants() -> Iterator[tuple[str, Any]]:
    """The mutants, each in a copy of titanlite."""
    sys.path.insert(0, str(ROOT / "tests/mutants"))
    import harness
    from mutants import MUTANTS

    for mutant in MUTANTS:
        yield mutant.name, lambda m=mutant: _of_mutant(harness, m)


def _of_mutant(harness: Any, mutant: Any) -> dict[str, float]:
    with harness.edited(mutant.edits) as folder:
        sections = {
            s: harness.BASE.get(s, {}) | mutant.job.get(s, {}) for s in {*harness.BASE, *mutant.job}
        }
        job = folder / "job.toml"
        job.write_text("".join(harness._toml(sections)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, __file__, "job", str(job), f"--steps={max(2, min(3, mutant.steps))}"],
            cwd=folder,
            env=harness.environment(folder),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def _one_job(path: str, steps: int) -> None:
    from titanlite.config import read_job
    from titanlite.errors import TitanliteError
    from titanlite.tools.verify.verify import Verifier

    with Verifier(threads=True) as verifier:
        try:
            job = read_job([f"--job.config_file={path}"]).require()
            found = worst_of(verifier, job, steps)
        except TitanliteError as error:
            print(error, file=sys.stderr)
            found = dict.fromkeys((*TOLERANCES, "always"), math.inf)
        print(json.dumps(found))


def _table(files: list[str]) -> None:
    print(
        "| cases | taken | found whatever the tolerance | 1.6e-2 | 0.1 | rounding | sensitivity |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for file in files:
        results = json.loads(Path(file).read_text(encoding="utf-8")).values()
        always = sum(one["always"] == math.inf for one in results)
        larger = sum(one["fixed"] * FIXED > LARGER for one in results) - always
        counts = [sum(one[name] > 1 for one in results) - always for name in TOLERANCES]
        counts.insert(1, larger)
        print(f"| {Path(file).stem} | {len(results)} | {always} | {' | '.join(map(str, counts))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("bugs", "mutants", "plans", "job", "table"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.what == "job":
        _one_job(given.files[0], given.steps)
        return
    if given.what == "table":
        _table(given.files)
        return
    cases = {"bugs": bugs, "mutants": mutants, "plans": plans}[given.what]
    results: dict[str, dict[str, float]] = {}
    taken = 0
    for number, (name, run) in enumerate(cases()):
        if number % given.every or taken >= given.most:
            continue
        taken += 1
        start = time.perf_counter()
        try:
            results[name] = run()
        except Exception as error:
            print(f"not run: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        line = {key: f"{value:.2g}" for key, value in results[name].items()}
        print(f"{time.perf_counter() - start:5.1f} s  {name}: {line}", flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
