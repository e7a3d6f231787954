"""Save fewer activations and recompute the others."""
