"""What plans, verifies, simulates and explains jobs, or uses what they train; no run needs it."""
