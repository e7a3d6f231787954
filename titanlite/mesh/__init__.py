"""The mesh axes, their degrees and coordinates (parallel_dims.py), and the device meshes."""
