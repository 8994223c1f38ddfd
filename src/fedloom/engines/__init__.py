"""Engines run clients; they do not know methods."""
