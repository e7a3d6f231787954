"""What a person sees of a run: its plan, its progress, its figures, its pictures and its traces."""
