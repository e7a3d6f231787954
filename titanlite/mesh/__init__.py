"""The mesh axes, degrees and coordinates (parallel_dims.py); the meshes (device_mesh.py)."""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.mesh.device_mesh import Meshes as Meshes
    from titanlite.mesh.device_mesh import build_meshes as build_meshes
    from titanlite.mesh.parallel_dims import ParallelDims as ParallelDims

PUBLIC = {"parallel_dims": ("ParallelDims",), "device_mesh": ("build_meshes", "Meshes")}
"""The public names, by module."""

lazy(__name__, PUBLIC)
