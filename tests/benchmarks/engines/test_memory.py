"""Tests of the memory benchmark; a small run guards the number of models."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.engines.memory import INPUTS, make_network, measure_peak, memory_of, run_fedcross, width_of

MODELS, WORKERS = 4, 2
KEPT = 2
"""Models that a worker may hold more, because malloc keeps freed layers below 32 MiB. Larger ones it gives back."""


def peak_of(folder: Path, parameters: int, models: int, rounds: int) -> tuple[int, int]:
    """Return the bytes of one model, and the peak memory of a run."""
    width = width_of(parameters)
    nbytes = 4 * sum(parameter.numel() for parameter in make_network(width).parameters())
    return nbytes, measure_peak(run_fedcross, folder, width, models, WORKERS, rounds).total


@pytest.mark.parametrize("parameters", [INPUTS, 1_000_000, 100_000_000])
def test_the_width_gives_about_the_number_of_parameters(parameters: int) -> None:
    layers = [INPUTS, *[width_of(parameters)] * 6, 10]
    count = sum(a * b + b for a, b in pairwise(layers))
    assert count == pytest.approx(parameters, rel=0.01) or parameters == INPUTS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_process_is_that_of_the_kernel() -> None:
    before = sum(memory_of(os.getpid()).values())
    held = bytearray(b"x" * (64 << 20))
    assert sum(memory_of(os.getpid()).values()) - before == pytest.approx(len(held), rel=0.1)
    assert memory_of(1 << 30) == {}


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_keeps_few_models_in_memory(tmp_path: Path) -> None:
    _, base = peak_of(tmp_path / "base", 1_000, 2, 2)
    nbytes, peak = peak_of(tmp_path / "run", 10_000_000, MODELS, 3)
    assert (peak - base) / nbytes <= 2 * MODELS + 2 * WORKERS + 6 + KEPT * WORKERS
