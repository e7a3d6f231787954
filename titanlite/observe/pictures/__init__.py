"""Pictures of a run, from plain values: losses, experts, the mesh, the pipeline's timeline."""
