"""Adapters of low rank on frozen linear layers."""
