"""The mesh axes, degrees and coordinates (parallel_dims.py); the meshes (device_mesh.py)."""
