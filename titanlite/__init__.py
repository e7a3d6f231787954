"""N-dimensional parallel training: developed, proved and planned on a laptop, run on GPUs."""
