"""Differential privacy of clients: clipping, noise, epsilon."""

from fedloom.privacy.accountant import PrivacyAccountant
from fedloom.privacy.compatibility import check_private_method, compose_privacy_compatible
from fedloom.privacy.mechanism import PrivacyMechanism

__all__ = [
    "PrivacyAccountant",
    "PrivacyMechanism",
    "check_private_method",
    "compose_privacy_compatible",
]
