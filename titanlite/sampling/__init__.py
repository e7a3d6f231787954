"""Sampling sequences from a trained model, on the ranks of a job; choice.py: the next token."""
