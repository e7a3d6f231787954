"""Initialization, loss, gradient norm, optimizer and step; their numbers are plan-invariant."""
