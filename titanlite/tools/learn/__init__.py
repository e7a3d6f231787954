"""Learn: the topics of docs/learn.md, each with a formula, a simulated and a measured number.

topics.py   the topics: question, formula, and how to simulate and to measure the number
jobs.py     small jobs that are planned and run on four ranks
processes.py   programs on four real processes, counted or timed on a slow link
curves.py   the pictures of the page: when communication or memory is the limit
command.py  `titanlite learn`
"""
