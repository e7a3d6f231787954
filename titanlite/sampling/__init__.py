"""Sampling sequences from a trained model: at the end of a run, or from a checkpoint.

generate.py samples on the ranks of a job; command.py is `titanlite sample`.
"""
