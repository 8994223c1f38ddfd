"""Layers that torch does not have, or has only in slower forms, and their Triton kernels."""
