"""Layers that torch lacks or has only in slower forms, and Triton kernels."""
