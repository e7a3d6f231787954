"""Compares a plan with one process on the same weights and data, and finds the cause of an error.

    command.py report.py    `titanlite verify`
    verify.py     verifies one job: runs it on one process and under its plan, compares, explains
    jobs.py       the job under its plan, and the same job on one process; shrink.py makes it small
    job_runs.py   runs both on a pool of ranks (pool.py), and keeps the references
    accumulation.py    whether the job on one process depends on how its batch is split
    causes.py     runs the first wrong step again in detail, and without some features
    run.py reload.py    on a rank: records the reference (step_files.py), and measures a plan
                  against the record (agreement.py) as plain numbers (record.py)
    differences.py result.py    combines the ranks' measurements, compares them with tolerances
    trace.py      on a rank, if something differs: every module's output (outputs.py, parts.py),
                  and gradients as weighted sums over parts of the batch (cells.py)
    diagnose.py   from the measurements (evidence.py) to the likely cause: inputs.py, passes.py,
                  gradients.py, shares.py, norms.py and updates.py, in the sentences of wording.py
    formulas.py recurrence.py    on a rank: checks of the run against formulas and settings
    matrix.py     plans that contain every pair of features (covering.py), drawn by overview.py

Only the modules that run on ranks import torch. Those that start ranks import them inside the
functions that they send there.
"""
