"""Readers of file formats: arrays, tables, text, images."""
