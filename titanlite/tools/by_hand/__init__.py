"""Saving and loading for a training loop that is not a job (docs/by_hand.md).

checkpoints.py   save_checkpoint and load_checkpoint, in the format of a job's
huggingface.py   export and load_weights: Hugging Face folders
"""
