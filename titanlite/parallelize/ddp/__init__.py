"""Replicate the model, and all-reduce its gradients."""
