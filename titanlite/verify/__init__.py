"""A plan against one process: the same weights and data, step by step, and what is wrong where.

    verify.py     one job verified, on ranks that later ones use too
    jobs.py       the job under its plan, and the same job on one process
    shrink.py     the same plan at small sizes
    pool.py       ranks that are started once and run one function after the other
    run.py        on a rank: the reference's record, and a plan measured against it
    record.py     what ranks write down, as plain numbers
    compare.py    what the ranks measured, put together and judged by what rounding can do
    trace.py      on a rank, once something differs: every module's output (parts.py), and gradients
                  as sums of the batch's parts (cells.py)
    diagnose.py   from the evidence to the likeliest cause, with evidence.py, factors.py, norms.py
                  and weights.py
    matrix.py     plans that have every pair of features (covering.py), drawn by overview.py
    command.py report.py    `titanlite verify`

All but run.py, trace.py, parts.py and cells.py is torch-free.
"""
