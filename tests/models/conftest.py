"""Fixtures of the tests of networks."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Triton then interprets its kernels, slowly. It is asked for when Triton is imported, by whomever.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So little work is not worth sharing, and threads that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def triton() -> None:
    """Triton; tests that want it are skipped where it is not there."""
    pytest.importorskip("triton")


@pytest.fixture
def fusing_on_a_gpu(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers go through kernels of our own, as they do without FEDLOOM_FUSE=0."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    monkeypatch.setattr("fedloom.models.layers.fused_relu.enabled", True)
    monkeypatch.setattr("fedloom.devices.precision._to_the_bit", False)
