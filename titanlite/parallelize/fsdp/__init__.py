"""Shard weights with FSDP2."""
