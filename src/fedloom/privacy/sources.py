"""Where the private draws come from: noise, and who takes part.

In a simulation from the run's seed, like every other draw, so that a run can be repeated. Who knows the seed can take
that noise away again and can tell who took part, so it protects nobody: on real data draw from the operating system.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.streams import Streams

Floats = NDArray[np.float64]


class Source(ABC):
    """Draws that must not be known to others."""

    repeatable: bool
    """Whether a round that is played again draws the same."""

    @abstractmethod
    def normal(self, round: int, count: int) -> Floats:
        """`count` standard normal numbers."""

    @abstractmethod
    def uniform(self, round: int, count: int) -> Floats:
        """`count` numbers in [0, 1), by which clients are drawn."""


@dataclass(frozen=True)
class FromSeed(Source):
    """Keyed by (seed, round)."""

    streams: Streams
    repeatable = True

    def normal(self, round: int, count: int) -> Floats:
        return self.streams.numpy("privacy noise", round).standard_normal(count)

    def uniform(self, round: int, count: int) -> Floats:
        return self.streams.numpy("privacy selection", round).random(count)


@dataclass(frozen=True)
class FromSystem(Source):
    """From the operating system's cryptographically secure generator."""

    repeatable = False

    def normal(self, round: int, count: int) -> Floats:
        # Box and Muller's transform: two uniform numbers give two normal ones.
        half = (count + 1) // 2
        radius = np.sqrt(-2 * np.log1p(-_uniform(half)))
        angle = 2 * np.pi * _uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def uniform(self, round: int, count: int) -> Floats:
        return _uniform(count)


def _uniform(count: int) -> Floats:
    """Numbers in [0, 1) with all the 53 bits that a float has there."""
    drawn = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return drawn.astype(np.float64) * 2.0**-53
