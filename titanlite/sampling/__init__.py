"""Sequences drawn from a trained model: at the end of a run, and from a checkpoint.

generate.py draws them on the ranks of a job, command.py is `titanlite sample`.
"""
