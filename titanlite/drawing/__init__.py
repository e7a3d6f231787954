"""What draws: schedules, meshes, rings and losses, from plain values that need no Job and no ranks.

schedule_svg.py schedule_html.py schedule_png.py schedule_text.py   a timeline, in four forms
palette.py   the colours of all four
mesh.py      which rank sits where on which axis, in plain ASCII
ring.py      sequence layouts and ring attention, as SVG
loss.py      the loss by step, as PNG
"""
