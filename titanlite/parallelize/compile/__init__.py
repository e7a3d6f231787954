"""Compile block by block."""
