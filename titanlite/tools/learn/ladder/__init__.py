"""The ladder from 0D to 4D: one workload; each rung adds a dimension and shows its gain and cost.

rungs.py     the rungs, run and checked against a single process; their table
command.py   `titanlite simulate ladder`, and the options that the scripts share
rung_*.py    each rung as a script of its own
scripts.py   `titanlite ladder 2d-pp`: runs a script, draws its timeline and prints its cost
"""
