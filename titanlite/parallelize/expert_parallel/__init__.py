"""Spread experts over ranks."""
