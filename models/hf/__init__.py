"""Hugging Face causal language models, their files unmodified, under titanlite's plans."""
