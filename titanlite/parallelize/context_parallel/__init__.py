"""Shard sequences over the cp axis, with ring attention."""
