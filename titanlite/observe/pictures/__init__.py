"""Pictures of a run, from plain values, without a Job or ranks.

mesh.py      the ranks on the axes of a mesh, in plain ASCII
loss.py      the loss by step, as PNG; experts.py   the load of experts
schedule_layout.py schedule_svg.py   a pipeline's timeline; palette.py   its colours
"""
