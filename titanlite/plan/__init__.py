"""What a job's step will take on any number of ranks, from a trace of its own code.

events.py      what a traced step does, as plain data (torch-free)
fake_world.py  a world of any size in one process
recorder.py    records operators, communication and memory
trace.py       builds a job in a fake world and records its second step
hardware.py    the figures of a device, from TOML (titanlite/plan/hardware/)
cost.py        the time of an operator and of a communication
timing.py      the time of a list of events, and of ranks that exchange messages
command.py     `titanlite plan`
"""
