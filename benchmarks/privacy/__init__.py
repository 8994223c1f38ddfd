"""Benchmark of differential privacy."""
