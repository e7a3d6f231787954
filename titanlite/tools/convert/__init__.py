"""`titanlite convert`: weights between checkpoints, .safetensors files and Hugging Face folders."""
