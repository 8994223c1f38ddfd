"""DP-FedAvg: the server sees a noisy mean of clipped updates, and nothing else.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018. With N clients, each of which
takes part with probability q = clients_per_round / N, and their updates d_k = w_k - w,

    d = (sum_k d_k min(1, C / ||d_k||) + Z C noise) / (q N),        w <- w + d

All clients have the same weight: with a weight from its number of samples, a client could move the sum further than C.
The sum is divided by the expected number of clients, q N, because the actual number depends on who took part. So one
client more or less moves d by at most C / (q N). Noise is added even if no client answers: its absence would reveal
that.

Everything up to the noise is computed in float64. Rounding to the model's float32 comes after it and reveals nothing,
while float32 sums would move by more than C in a large model.

A server that needs only the mean gets `clients_per_round` copies of it, so everything it computes is private already.

In a simulation, noise and client sampling come from the run's seed, so that the run can be repeated. Whoever knows the
seed can remove the noise and tell who took part, so it protects nobody: on real data, draw from the operating system.
"""

import math
import os
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


@dataclass(frozen=True)
class _SeededNoise:
    """Draws keyed by (seed, round), the same in a repeated round."""

    rng_streams: RngStreams
    repeatable = True

    def normal(self, round: int, count: int) -> Floats:
        """Return `count` standard normal numbers."""
        return self.rng_streams.numpy("privacy noise", round).standard_normal(count)

    def uniform(self, round: int, count: int) -> Floats:
        """Return `count` numbers in [0, 1), which sample the clients."""
        return self.rng_streams.numpy("privacy selection", round).random(count)


class _SystemNoise:
    """The same from the operating system's cryptographically secure generator, new each time."""

    repeatable = False

    def normal(self, round: int, count: int) -> Floats:
        # Box-Muller transform: two uniform numbers give two normal ones.
        half = (count + 1) // 2
        radius = np.sqrt(-2 * np.log1p(-_uniform(half)))
        angle = 2 * np.pi * _uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def uniform(self, round: int, count: int) -> Floats:
        return _uniform(count)


def _uniform(count: int) -> Floats:
    """Return numbers in [0, 1) with all 53 bits that a float has there."""
    drawn = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return drawn.astype(np.float64) * 2.0**-53


NO_CLIENT = -1
"""The `client_id` of a mean."""


def _clip_update(model: Tensor, received_model: Tensor, clip: float, out: Tensor | None = None) -> Tensor:
    """Return `model - received_model` in float64 (in `out`), scaled down to length `clip` if it is longer."""
    way = torch.sub(model, received_model.double(), out=out)
    # The factor of an update within the clip is exactly 1. It stays a tensor, so that nothing waits for a GPU.
    return way.mul_((clip / torch.linalg.vector_norm(way)).clamp_(max=1))


@dataclass(frozen=True)
class PrivacyMechanism:
    """The private mean of one run."""

    clip: float
    """The clipping norm C."""
    noise: float
    """The noise multiplier Z. With 0, updates are clipped, but nothing is private."""
    num_clients: int
    clients_per_round: int
    source: _SeededNoise | _SystemNoise
    account: PrivacyAccountant

    @classmethod
    def of(cls, config: Config, num_clients: int, rng_streams: RngStreams) -> "PrivacyMechanism | None":
        """Return the mechanism that a config asks for, or None."""
        if config.clip_update is None:
            return None
        delta = config.delta if config.delta is not None else _default_delta(num_clients)
        return cls(
            clip=config.clip_update,
            noise=config.noise,
            num_clients=num_clients,
            clients_per_round=config.cohort_size,
            source=_SystemNoise() if config.noise_source == "system" else _SeededNoise(rng_streams),
            account=PrivacyAccountant(config.noise, config.cohort_size / num_clients, delta),
        )

    def rounds_of(self, config: Config) -> int:
        """Return the number of rounds: that of the config, or fewer to stay within `max_epsilon`."""
        if config.max_epsilon is None:
            return config.rounds
        rounds = self.account.rounds_within(config.max_epsilon, config.rounds)
        if not rounds:
            raise InputError(
                f"max_epsilon is {config.max_epsilon:g}, but one round with noise {self.noise:g} spends "
                f"{self.account.epsilon(1):.3g}; use more noise or fewer clients per round."
            )
        return rounds

    @property
    def repeatable(self) -> bool:
        """Return whether a repeated round gives the same model, and so reveals no more."""
        return not self.noise or self.source.repeatable

    def sample_clients(self, round: int) -> list[int]:
        """Sample each client independently with probability q, as the accountant assumes; maybe none."""
        drawn = self.source.uniform(round, self.num_clients) < self.clients_per_round / self.num_clients
        return [int(client_id) for client_id in np.flatnonzero(drawn)]

    def mean(self, round: int, base: Tensor, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Yield `clients_per_round` copies of the private mean of updates to the model `base`."""
        w = base.double()
        total, room = torch.zeros_like(w), torch.empty_like(w)
        for update in updates:
            total.add_(_clip_update(update.row, w, self.clip, out=room))
        if self.noise:
            # The factor is Z C. Without the root, the last bit differs for some values, and so does a run's digest.
            root = math.sqrt(self.clients_per_round)
            drawn = torch.from_numpy(self.source.normal(round, total.numel()))
            total.add_(drawn.to(total.device), alpha=self.noise * self.clip / root * root)
        row = total.div_(self.clients_per_round).add_(base).to(base.dtype)
        mean = ClientUpdate(ClientTask(NO_CLIENT, base), row, num_examples=1, loss=math.nan, steps=0)
        for _ in range(self.clients_per_round):
            yield mean

    def spent(self, rounds: int) -> dict[str, float | None]:
        """Return epsilon and delta for the record of a round; epsilon is None without a guarantee."""
        epsilon = self.account.epsilon(rounds)
        return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": self.account.delta}


def _default_delta(num_clients: int) -> float:
    """Return McMahan's choice, 1 / N^1.1: less than one client in expectation."""
    return float(min(0.5, num_clients**-1.1))


def mechanism_base_model(tasks: Sequence[ClientTask], models: Tensor) -> Tensor:
    """Return the model that all clients received, or the next round's start if none was sampled."""
    return tasks[0].row if tasks else models[0]
