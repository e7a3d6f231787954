"""Drawings for the tools, from plain values, without a Job or ranks.

timeline.py   what ran when, of a schedule, simulated or measured
schedule_svg.py schedule_png.py schedule_text.py   draw a timeline, which
               schedule_layout.py lays out; palette.py: the colours
messages.py  the messages between ranks, as SVG and as a page to step through
canvas.py    the shapes of messages.py
trace.py       a timeline as a Chrome trace
mesh_drawing.py   the position of each rank on the mesh, in plain text
page_file.py   a page of its .html, .css and .js in page/
chart.py sweep.py memory.py figure.py   curves, a sweep of simulations, the memory of workers
"""
