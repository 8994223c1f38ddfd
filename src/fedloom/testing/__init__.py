"""Tests for your own methods: `check_method`, small data, small runs."""

from fedloom.testing.fixtures import (
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
    small_run,
)
from fedloom.testing.method_checks import CHECKS, check_method

__all__ = [
    "CHECKS",
    "SmallFederatedDataset",
    "batch_norm_network",
    "build_small_run",
    "check_method",
    "simple_network",
    "small_run",
]
