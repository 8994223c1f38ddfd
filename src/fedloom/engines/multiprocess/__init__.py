"""Clients in worker processes over shared memory."""
