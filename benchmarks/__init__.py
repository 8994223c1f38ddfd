"""Benchmarks of the engines, the methods and whole experiments.

`python -m benchmarks --list` shows their names.
"""
