"""Runs that are stuck or have lost a rank: they end by themselves, and say which rank and where.

watch.py is the thread in each rank that notices; account.py what a rank can say of itself, and
last_words.py what is known of one that cannot; report.py puts all of it together. order.py compares
what ranks have called where nothing seems wrong.
"""
