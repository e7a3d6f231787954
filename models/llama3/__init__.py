"""Llama 3 (arXiv 2407.21783): a causal language model."""
