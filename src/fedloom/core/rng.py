"""Keyed randomness: (seed, purpose, round, client) names a stream, and a stream gives the same draws everywhere.

Nothing in fedloom draws from a global generator. So a run does not depend on the number of workers or on the order
in which clients finish, a resumed run draws what the uninterrupted one would have drawn, and two methods with one
seed see the same clients and the same batches.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

PURPOSES = frozenset(
    {
        "augment",
        "batches",
        "client test",
        "dynafed images",
        "dynafed refine",
        "dynafed segment",
        "dynafed steps",
        "exchange",
        "exchange {attempt} {number}",
        "fedbe",
        "fedbe dirichlet",
        "fedbe gaussian",
        "fedcda",
        "fedcluster",
        "fedcluster cycle",
        "feddf",
        "feddf validation",
        "fedgen",
        "fedgen generator",
        "fedlaw",
        "fedma",
        "fedma layer {n}",
        "fedmut",
        "fomo",
        "head",
        "init",
        "lost",
        "noise",
        "partition",
        "personal",
        "privacy noise",
        "privacy selection",
        "recombine",
        "select",
        "server data",
        "slots",
        "soup",
        "statistics",
        "validation",
    }
)
"""Every purpose that fedloom draws for; numbers stand in braces. Your own methods may draw for any other.

The purpose is part of the seed. Renaming one changes the results of every run that draws for it.
"""

GLOBAL_RNG_LOCK = threading.RLock()
"""Held by whoever has lent torch's global generators to a stream: several runs may share one process."""


@contextmanager
def use_generator(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Let the global generator of a GPU have the state of another one, which goes on from there."""
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
    """The streams of one run."""

    seed: int

    def key(self, purpose: str, round: int = 0, client: int = 0) -> int:
        """128 bits that belong to this stream alone."""
        name = f"{self.seed}|{purpose}|{round}|{client}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")

    def numpy(self, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
        """The stream as a numpy generator (Philox, counter based)."""
        return np.random.Generator(np.random.Philox(key=self.key(purpose, round, client)))

    def pytorch(
        self, purpose: str, round: int = 0, client: int = 0, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """The stream as a torch generator on `device` (on the CPU torch uses 32 bits of the key)."""
        generator = torch.Generator(device=device)
        return generator.manual_seed(self.key(purpose, round, client) >> 65)

    @contextmanager
    def globally(
        self, purpose: str, round: int = 0, client: int = 0, device: torch.device | str = "cpu"
    ) -> Iterator[None]:
        """Let code that only knows torch's global generator (dropout, initialisation) draw from this stream.

        The global generators are afterwards as they were before.
        """
        device = torch.device(device)
        devices = [device.index or 0] if device.type == "cuda" else []
        with GLOBAL_RNG_LOCK, torch.random.fork_rng(devices=devices):
            seed = self.key(purpose, round, client) >> 65
            torch.default_generator.manual_seed(seed)
            for index in devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            yield
