"""A causal transformer over the pixels of an image."""
