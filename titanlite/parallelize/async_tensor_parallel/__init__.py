"""Overlap the communication over tp with matrix products."""
