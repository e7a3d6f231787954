"""Checkpoints: written atomically, loadable under any plan, with the full training state.

run.py         the checkpoints that a run saves, and when
start.py       what a run starts from: a checkpoint, given weights, or nothing
state.py       the training state: weights, optimizer, schedule, sampler, random generators
storage.py     tensors to and from files, by torch.distributed.checkpoint (DCP); staging.py: copies
manifest.py    manifest.json: sizes, checksums, numbers (torch-free); metadata.py: DCP's .metadata
folder.py      a folder of checkpoints: names, renames, removal (torch-free)
weights.py     the weights of the whole model as .safetensors files, read in shards
huggingface.py writes a Hugging Face folder
group.py       the process group of saves and loads
"""
