"""Drawings of schedules, meshes, rings and losses, from plain values, without a Job or ranks.

schedule_layout.py   the picture of a timeline in boxes, texts and lines
schedule_svg.py schedule_html.py schedule_png.py schedule_text.py   a timeline, in four formats
palette.py   the colours of all four
mesh.py      the ranks on the axes of a mesh, in plain ASCII
ring.py      sequence layouts and ring attention, as SVG
messages.py  the messages between ranks, as SVG and as a page to step through
canvas.py    the shapes of ring.py and messages.py
loss.py      the loss by step, as PNG
sweep.py memory.py figure.py   a sweep of simulations and the memory of workers, as PNG or SVG
"""
