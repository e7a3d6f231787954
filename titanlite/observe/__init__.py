"""What a run shows: its plan, progress, metrics, pipeline timelines and profiler traces."""
