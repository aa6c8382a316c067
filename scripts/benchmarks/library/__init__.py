"""Modules that the studies in ``scripts/benchmarks`` share. The README of that folder says what each is for.

A study is started as a script, so Python puts ``scripts/benchmarks`` on ``sys.path``, and every import of this package
is written ``from library.module import name``, also in the processes that a study starts (see ``cluster.py``).
"""
