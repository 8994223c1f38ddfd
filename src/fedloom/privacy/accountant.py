"""Privacy accountant: epsilon of rounds with noise.

It uses two accountants of Google's dp-accounting, and reports the lower epsilon: both are upper bounds.

A round is one Poisson-sampled Gaussian mechanism: every client takes part independently with probability q, and the sum
of updates no longer than C gets noise of standard deviation Z C. Two federated data sets are neighbors if one client,
with all of its samples, is in only one of them; the sum then differs by at most C. The Rényi accountant (RDP) adds up
divergences over rounds. The other (PLD) composes the distribution of the privacy loss numerically, rounded upwards, and
is usually the tighter one. Both hold whatever a round learned from earlier ones, so epsilon depends on the number of
rounds alone.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from fedloom.errors import InputError

GRID_STEP = 1e-3
"""Distance of the points at which the privacy loss is stored. Ten times fewer points change the fourth digit."""
LEAST_NOISE = 0.1
"""Noise below which the losses are so large that the grid gets wider, so that it keeps its size."""


class PrivacyAccountant:
    """Compute epsilon after any number of rounds."""

    def __init__(self, noise: float, chance: float, delta: float) -> None:
        """`noise` is Z; `chance` is q, the probability that a client takes part."""
        self.noise, self.chance, self.delta = noise, chance, delta

    def epsilon(self, rounds: int) -> float:
        """Return epsilon after `rounds` rounds; infinite without noise."""
        if rounds == 0:
            return 0.0
        if not self.noise:
            return math.inf
        with _quiet():
            composed = self._loss_of_round.self_compose(rounds).get_epsilon_for_delta(self.delta)
        return min(self._renyi_epsilon(rounds), float(composed))

    def _renyi_epsilon(self, rounds: int) -> float:
        """Return the bound of the Rényi accountant."""
        orders, cost = self._round
        with _quiet():
            return float(_library().rdp.compute_epsilon(orders, rounds * cost, self.delta)[0])

    @cached_property
    def _round(self) -> tuple[Any, Any]:
        """Return the orders of the Rényi divergences, and the divergence of a round at each."""
        library = _library()
        event = library.GaussianDpEvent(self.noise)
        if self.chance < 1:
            event = library.PoissonSampledDpEvent(self.chance, event)
        accountant = library.rdp.RdpAccountant()
        with _quiet():
            accountant.compose(event)
        return accountant.orders, accountant.rdp

    @cached_property
    def _loss_of_round(self) -> Any:
        """Return the distribution of the privacy loss of a round, on a grid that a small noise makes wider."""
        step = GRID_STEP * max(1.0, (LEAST_NOISE / self.noise) ** 2)
        with _quiet():
            return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
                self.noise, sampling_prob=self.chance, value_discretization_interval=step
            )

    def rounds_within(self, max_epsilon: float, planned: int) -> int:
        """Return how many of the planned rounds spend no more than `max_epsilon`."""
        return bisect_right(range(planned + 1), max_epsilon, key=self.epsilon) - 1  # epsilon never decreases


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise InputError(
            "noise needs the package dp-accounting, which is not installed; install it with: "
            "pip install 'fedloom[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the accountant's warnings: an order that it cannot compute is left out, so the bound is only less tight."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
