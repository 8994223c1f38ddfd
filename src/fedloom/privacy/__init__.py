"""Differential privacy of the clients: clipped updates, a noisy mean, and an account of what it has cost."""

from fedloom.privacy.account import Account
from fedloom.privacy.fit import compose_private, refuse_unfit
from fedloom.privacy.mechanism import Privacy, clipped

__all__ = ["Account", "Privacy", "clipped", "compose_private", "refuse_unfit"]
