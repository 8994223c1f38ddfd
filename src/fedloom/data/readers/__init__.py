"""Readers of files: arrays, tables, text, images."""
