"""N-dimensional parallel training for PyTorch, developed and verified on a laptop, run on GPUs."""
