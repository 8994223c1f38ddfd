"""Benchmark of the CUDA engine."""
