"""DP-FedAvg: the server sees a noisy mean of clipped updates, and nothing else.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018. With N clients, of which each
takes part with the chance q = per_round / N, and their updates d_k = w_k - w,

    d = (sum_k d_k min(1, C / ||d_k||) + Z C noise) / (q N),        w <- w + d

Clients count alike, because a weight that a client's samples decide would let it move the sum further than C; and the
sum is divided by the number that was expected, q N, because the number that answered depends on who was there. So a
client more or less moves d by at most C / (q N). Noise is added even where nobody answered: its absence would tell.

Everything up to the noise is computed in float64. The rounding to the model's float32 comes after it and so reveals
nothing, while float32 sums would move by more than C where the model is large.

A server that needs the mean alone is handed `per_round` copies of it, so what it does with them, it does to something
private already.

Where the private draws come from: noise, and who takes part.

In a simulation from the run's seed, like every other draw, so that a run can be repeated. Who knows the seed can take
that noise away again and can tell who took part, so it protects nobody: on real data draw from the operating system.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.config import Config
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.privacy.accountant import PrivacyAccountant

Floats = NDArray[np.float64]


class _NoiseSource(ABC):
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
class _SeededNoise(_NoiseSource):
    """Keyed by (seed, round)."""

    streams: RngStreams
    repeatable = True

    def normal(self, round: int, count: int) -> Floats:
        return self.streams.numpy("privacy noise", round).standard_normal(count)

    def uniform(self, round: int, count: int) -> Floats:
        return self.streams.numpy("privacy selection", round).random(count)


@dataclass(frozen=True)
class _SystemNoise(_NoiseSource):
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


NO_CLIENT = -1
"""The client of a mean."""


def _clip_update(row: Tensor, received: Tensor, clip: float, out: Tensor | None = None) -> Tensor:
    """The way from `received` to `row`, in float64 (in `out`), scaled down to the length `clip` where it is longer."""
    way = torch.sub(row, received.double(), out=out)
    # The factor of an update within the clip is exactly 1. It stays a tensor: nobody waits for a GPU to tell it.
    return way.mul_((clip / torch.linalg.vector_norm(way)).clamp_(max=1))


@dataclass(frozen=True)
class PrivacyMechanism:
    """The private mean of one run."""

    clip: float
    """C."""
    noise: float
    """Z; with 0 updates are clipped, and nothing is private."""
    clients: int
    per_round: int
    source: _NoiseSource
    account: PrivacyAccountant

    @classmethod
    def of(cls, config: Config, clients: int, streams: RngStreams) -> "PrivacyMechanism | None":
        """What a config asks for; None where it asks for none."""
        if config.clip_update is None:
            return None
        delta = config.delta if config.delta is not None else _default_delta(clients)
        return cls(
            clip=config.clip_update,
            noise=config.noise,
            clients=clients,
            per_round=config.cohort,
            source=_SystemNoise() if config.noise_source == "system" else _SeededNoise(streams),
            account=PrivacyAccountant(config.noise, config.cohort / clients, delta),
        )

    def rounds_of(self, config: Config) -> int:
        """How many rounds there will be: those that the config asks for, or fewer if more would cost too much."""
        if config.max_epsilon is None:
            return config.rounds
        rounds = self.account.rounds_within(config.max_epsilon, config.rounds)
        if not rounds:
            raise InputError(
                f"max_epsilon is {config.max_epsilon:g}, but one round with noise {self.noise:g} spends "
                f"{self.account.epsilon(1):.3g}; take more noise, or ask fewer clients in a round."
            )
        return rounds

    @property
    def repeatable(self) -> bool:
        """Whether a round that is played again gives the same model, and so reveals no more."""
        return not self.noise or self.source.repeatable

    def select(self, round: int) -> list[int]:
        """Whom to ask: every client with the chance q, on its own, as the account assumes. It may be nobody."""
        drawn = self.source.uniform(round, self.clients) < self.per_round / self.clients
        return [int(client) for client in np.flatnonzero(drawn)]

    def mean(self, round: int, base: Tensor, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """`per_round` copies of the private mean of updates to the model `base`."""
        w = base.double()
        total, room = torch.zeros_like(w), torch.empty_like(w)
        for update in updates:
            total.add_(_clip_update(update.row, w, self.clip, out=room))
        if self.noise:
            # This is Z C. Without the root, the last bit differs for some values, and with it the digest of a run.
            root = math.sqrt(self.per_round)
            drawn = torch.from_numpy(self.source.normal(round, total.numel()))
            total.add_(drawn.to(total.device), alpha=self.noise * self.clip / root * root)
        row = total.div_(self.per_round).add_(base).to(base.dtype)
        mean = ClientUpdate(ClientTask(NO_CLIENT, base), row, samples=1, loss=math.nan, steps=0)
        for _ in range(self.per_round):
            yield mean

    def spent(self, rounds: int) -> dict[str, float | None]:
        """For the record of a round: epsilon and delta, epsilon None where nothing is guaranteed."""
        epsilon = self.account.epsilon(rounds)
        return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": self.account.delta}


def _default_delta(clients: int) -> float:
    """McMahan's choice, 1 / N^1.1: less than one client in expectation."""
    return float(min(0.5, clients**-1.1))


def common_base_model(jobs: Sequence[ClientTask], models: Tensor) -> Tensor:
    """The one model that everybody was sent; where nobody was asked, the one that the next round starts from."""
    return jobs[0].row if jobs else models[0]
