"""Fixtures of the tests of networks."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So little work is not worth sharing, and threads that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def triton() -> None:
    """Triton; without a GPU it interprets its kernels, slowly. Tests that want it are skipped where it is not there."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when it is imported, which nobody else does on a CPU
    pytest.importorskip("triton")
