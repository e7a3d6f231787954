"""`titanlite sample`: sequences from the model in a checkpoint."""
