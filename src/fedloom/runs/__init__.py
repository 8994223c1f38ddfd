"""Runs: build them from a config, run their rounds, and store them on disk."""
