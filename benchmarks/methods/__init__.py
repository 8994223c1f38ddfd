"""Benchmarks of single methods."""
