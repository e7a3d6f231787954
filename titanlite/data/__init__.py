"""Sequences to train on: which data sets there are, and which sample comes when."""
