"""Random streams with the key (seed, purpose, round, client).

The same key gives the same draws everywhere.

Nothing in fedloom draws from an unseeded global generator. So a result does not depend on the number of workers or on
the order in which clients finish, a resumed run draws what the uninterrupted run would have drawn, and two methods
with one seed see the same clients and batches.

A purpose is part of the seed: renaming one changes the results of every run that uses it. A test lists those of
fedloom. Your own methods may use any other string.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

GLOBAL_RNG_LOCK = threading.RLock()
"""Held while torch's global generators are seeded for a stream: several runs may share one process."""


@contextmanager
def use_generator(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Replace the global generator of a GPU by another one, whose state advances with each draw."""
    if device.type != "cuda":
        yield
        return
    everyone = torch.cuda.default_generators[device.index or 0]
    outside = everyone.graphsafe_get_state()
    everyone.graphsafe_set_state(generator)
    try:
        yield
    finally:
        everyone.graphsafe_set_state(outside)


@dataclass(frozen=True)
class RngStreams:
    """Create the random generators of one run."""

    seed: int

    def key(self, purpose: str, round: int = 0, client_id: int = 0) -> int:
        """Return the 128-bit key of a stream."""
        name = f"{self.seed}|{purpose}|{round}|{client_id}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")

    def numpy(self, purpose: str, round: int = 0, client_id: int = 0) -> np.random.Generator:
        """Return a new numpy generator of this stream (Philox, counter based)."""
        return np.random.Generator(np.random.Philox(key=self.key(purpose, round, client_id)))

    def pytorch(
        self, purpose: str, round: int = 0, client_id: int = 0, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """Return a new torch generator of this stream on `device` (on the CPU, torch uses 32 bits of the key)."""
        generator = torch.Generator(device=device)
        return generator.manual_seed(self.key(purpose, round, client_id) >> 65)

    @contextmanager
    def seed_global_rng(
        self, purpose: str, round: int = 0, client_id: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[None]:
        """Seed torch's global generators from this stream, for dropout and initialization; restore them at the end."""
        device = torch.device(device)
        devices = [device.index or 0] if device.type == "cuda" else []
        with GLOBAL_RNG_LOCK, torch.random.fork_rng(devices=devices):
            seed = self.key(purpose, round, client_id) >> 65
            torch.default_generator.manual_seed(seed)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            yield
