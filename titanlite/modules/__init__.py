"""What titanlite knows of any nn.Module, whatever the plan.

batch.py            the fields of a batch, and how a model is called with them
attention/ experts/ dropout.py keyed.py    layers and random numbers that models are made of
names.py tied.py shards.py                 names of tensors, which are one, which part is here
draws.py            which modules draw from torch's own generators
gradient_sums.py    marks gradients that the step has to sum
"""
