"""Compares any parallel code with the plain model that it should equal: `titanlite.compare`.

    comparison.py   compare(): starts the ranks, judges their measurements, finds the cause
    request.py      the arguments, checked before a process starts, and sent to the ranks
    reference.py    on one process: runs the plain model and records every step
    parallel.py     on a rank: runs the caller's parallel code and measures it against the record
    building.py     on a rank: calls the caller's functions, finds modules and parameters
    local_parts.py  on a rank: which part of each of the reference's tensors it holds
    batches.py      on a rank: its part of each batch, and which rows and columns these are
    code_trace.py   on a rank: which part of what the reference's modules receive and return it has
    findings.py     the likely cause of a difference

tools/verify/ has what it shares with jobs. Only the modules that run on ranks import torch.
"""
