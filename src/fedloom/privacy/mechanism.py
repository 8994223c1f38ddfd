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
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.config import Config
from fedloom.errors import InputError
from fedloom.exchange import Job, Update
from fedloom.privacy.account import Account
from fedloom.privacy.sources import FromSeed, FromSystem, Source
from fedloom.streams import Streams

NOBODY = -1
"""The client of a mean."""


def clipped(row: Tensor, received: Tensor, clip: float, out: Tensor | None = None) -> Tensor:
    """The way from `received` to `row`, in float64 (in `out`), scaled down to the length `clip` where it is longer."""
    way = torch.sub(row, received.double(), out=out)
    # The factor of an update within the clip is exactly 1. It stays a tensor: nobody waits for a GPU to tell it.
    return way.mul_((clip / torch.linalg.vector_norm(way)).clamp_(max=1))


@dataclass(frozen=True)
class Privacy:
    """The private mean of one run."""

    clip: float
    """C."""
    noise: float
    """Z; with 0 updates are clipped, and nothing is private."""
    clients: int
    per_round: int
    source: Source
    account: Account

    @classmethod
    def of(cls, config: Config, clients: int, streams: Streams) -> "Privacy | None":
        """What a config asks for; None where it asks for none."""
        if config.clip_update is None:
            return None
        delta = config.delta if config.delta is not None else default_delta(clients)
        return cls(
            clip=config.clip_update,
            noise=config.noise,
            clients=clients,
            per_round=config.cohort,
            source=FromSystem() if config.noise_source == "system" else FromSeed(streams),
            account=Account(config.noise, config.cohort / clients, delta),
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

    def mean(self, round: int, base: Tensor, updates: Iterator[Update]) -> Iterator[Update]:
        """`per_round` copies of the private mean of updates to the model `base`."""
        w = base.double()
        total, room = torch.zeros_like(w), torch.empty_like(w)
        for update in updates:
            total.add_(clipped(update.row, w, self.clip, out=room))
        if self.noise:
            # This is Z C. Without the root, the last bit differs for some values, and with it the digest of a run.
            root = math.sqrt(self.per_round)
            drawn = torch.from_numpy(self.source.normal(round, total.numel()))
            total.add_(drawn.to(total.device), alpha=self.noise * self.clip / root * root)
        row = total.div_(self.per_round).add_(base).to(base.dtype)
        mean = Update(Job(NOBODY, base), row, samples=1, loss=math.nan, steps=0)
        for _ in range(self.per_round):
            yield mean

    def spent(self, rounds: int) -> dict[str, float | None]:
        """For the record of a round: epsilon and delta, epsilon None where nothing is guaranteed."""
        epsilon = self.account.epsilon(rounds)
        return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": self.account.delta}


def default_delta(clients: int) -> float:
    """McMahan's choice, 1 / N^1.1: less than one client in expectation."""
    return float(min(0.5, clients**-1.1))


def base_of(jobs: Sequence[Job], models: Tensor) -> Tensor:
    """The one model that everybody was sent; where nobody was asked, the one that the next round starts from."""
    return jobs[0].row if jobs else models[0]
