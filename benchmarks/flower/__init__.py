"""Benchmarks of runs over Flower."""
