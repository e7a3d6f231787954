"""Runs that are stuck or have lost a rank: they end by themselves, and say which rank and where.

watch.py is the thread in each rank that notices, account.py what a rank can say of itself, and
report.py puts the accounts of all ranks together.
"""
