"""Processes: how the ranks of a run start, meet, stop, and end when one of them is stuck or lost.

launch.py machine.py   local ranks, and how many this machine takes
world.py attempt.py    one rank's process group, device, threads and allocator; ranks started again
signals.py             SIGINT and SIGTERM as a request to stop
watch.py               the thread in each rank that notices a stuck or lost rank
account.py last_words.py report.py   what a rank says of itself, what is known of one that cannot,
                       and all of it put together
order.py               whether ranks call the same collectives, where nothing seems wrong

Nothing here knows what a mesh axis means, but for its name.
"""
