"""What a job's step will take on any number of ranks, from a trace of its own code.

events.py      what a traced step does, as plain data (torch-free)
fake_world.py  a world of any size in one process
recorder.py    records operators, communication and memory
trace.py       builds a job in a fake world and records its second step
command.py     `titanlite plan`
"""
