"""Benchmarks of training on a CPU."""
