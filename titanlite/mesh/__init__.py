"""Ranks and axes: degrees, coordinates, process groups, device meshes, and starting local ranks."""
