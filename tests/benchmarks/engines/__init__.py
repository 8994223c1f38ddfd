"""Tests of the benchmarks of engines."""
