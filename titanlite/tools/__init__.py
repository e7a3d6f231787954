"""What plans, verifies, simulates and explains jobs; the trainer imports none of it."""
