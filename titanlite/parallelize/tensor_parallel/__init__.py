"""Shard modules over the tp axis."""
