"""A plan against one process: the same weights and data, step by step, and what is wrong where.

    verify.py     one job verified, on ranks that later ones use too
    jobs.py       the job under its plan, and the same job on one process
    shrink.py     the same plan at small sizes
    pool.py       ranks that are started once and run one function after the other
    run.py        on a rank: the reference's record, and a plan measured against it
    record.py     what ranks write down, as plain numbers
    compare.py    what the ranks measured, put together and judged by what rounding can do
    command.py report.py    `titanlite verify`

All but run.py is torch-free.
"""
