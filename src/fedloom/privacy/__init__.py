"""Differential privacy of the clients: clipped updates, a noisy mean, and an account of what it has cost."""

from fedloom.privacy.accountant import PrivacyAccountant
from fedloom.privacy.compatibility import check_private_method, compose_with_privacy
from fedloom.privacy.mechanism import PrivacyMechanism, _clip_update

__all__ = ["PrivacyAccountant", "PrivacyMechanism", "_clip_update", "check_private_method", "compose_with_privacy"]
