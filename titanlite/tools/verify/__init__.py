"""Compares a plan with one process on the same weights and data, and finds the cause of an error.

Of a job, from its command to its verdict:

    command.py    `titanlite verify`; report.py formats the result, result.py; junit.py
    pytest_plugin.py    fixtures for the test suites of others
    verify.py     verifies one job: runs it on one process and under its plan, compares, explains
    jobs.py       the job under its plan, and the same job on one process; shrink.py makes it small
    job_runs.py   runs both on ranks, and keeps the references: on a rank, run.py and reload.py
    accumulation.py    whether the job on one process depends on how its batch is split
    causes.py     runs the first wrong step again in detail (on a rank, job_trace.py, parts.py and
                  cells.py), and without some features
    matrix.py     plans that contain every pair of features (covering.py), drawn by overview.py

`program/` compares any other parallel code with its plain model. Both use

    pool.py       pools of ranks that run one function after the other, on one gloo device (gloo.py)
    subject.py    on a rank: the parameters of a job or of other code, recorded and compared
                  (agreement.py) with the record of a step (step_files.py) as plain numbers
                  (record.py)
    events.py tracing.py     on a rank: what modules receive and return, and the gradients of both,
                  recorded and compared in detail
    differences.py    combines the ranks' measurements, and compares them with tolerances
    watching.py   on a rank: what a step sends and reads, judged by economy.py
    sensitivity.py    a tolerance from how far rounding moves the reference (perturbation.py)
    diagnose.py   from the measurements (evidence.py) to the likely cause: inputs.py, dataflow.py,
                  passes.py, gradients.py, shares.py, norms.py and updates.py, in the sentences of
                  wording.py

Of jobs alone:

    formulas.py recurrence.py    on a rank: checks of the run against formulas and settings
    experts.py routing.py sequences.py inspect_model.py    what only jobs have

Only the modules that run on ranks import torch. Those that start ranks import them inside the
functions that they send there.
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.tools.verify.from_python import VerifyResult as VerifyResult
    from titanlite.tools.verify.program.comparison import Comparer as Comparer
    from titanlite.tools.verify.program.result import Comparison as Comparison

PUBLIC = {
    "from_python": ("VerifyResult",),
    "program.comparison": ("Comparer",),
    "program.result": ("Comparison",),
}
"""The public names, by module."""

lazy(__name__, PUBLIC)
