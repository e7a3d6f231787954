"""Axes: what each means, degrees and coordinates, and the device meshes made of them."""
