"""What draws schedules, from plain values that need no Job and no ranks.

schedule_svg.py schedule_html.py schedule_png.py schedule_text.py   a timeline, in four forms
palette.py   the colours of all four
"""
