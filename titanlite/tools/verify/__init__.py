"""Compares a plan with one process on the same weights and data, and finds the cause of an error.

    verify.py     verifies one job
    jobs.py       the job under its plan, and the same job on one process
    shrink.py     the same plan with a small model
    pool.py       a pool of ranks that is reused from job to job
    run.py        on a rank: records the reference, and measures a plan against the record
    record.py     the measurements, as plain numbers; result.py has what they amount to
    compare.py    combines the ranks' measurements and compares them with the tolerances
    trace.py      on a rank, if something differs: every module's output (outputs.py, parts.py),
                  and gradients as weighted sums over parts of the batch (cells.py)
    diagnose.py   from the measurements (evidence.py) to the likely cause: inputs.py, passes.py,
                  gradients.py, shares.py, norms.py and updates.py, in the sentences of wording.py
    formulas.py recurrence.py    on a rank: checks of the run against formulas and settings
    matrix.py     plans that contain every pair of features (covering.py), drawn by overview.py
    command.py report.py    `titanlite verify`

Only the modules that run on ranks import torch: run.py, trace.py, outputs.py, parts.py, cells.py,
formulas.py, recurrence.py and inspect_model.py.
"""
