"""Checkpoints that are whole or not there, load under any plan, and hold all it takes to go on.

run.py         the checkpoints of one run: what it saves on the way, and when
start.py       where a run starts from
state.py       what a job has to carry on with
storage.py     tensors to and from files, by torch.distributed.checkpoint; staging.py: copies
manifest.py    sizes, checksums and numbers (torch-free); metadata.py: what DCP says of its files
folder.py      names, renames and removal (torch-free)
weights.py     the whole model's weights alone, as .safetensors
agreement.py   what the ranks decide together
"""
