"""Layers that are not torch's own, and their kernels."""
