"""Devices: names, numerical precision, CUDA streams and CUDA graphs."""
