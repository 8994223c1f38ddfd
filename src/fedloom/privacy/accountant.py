"""What rounds with noise have cost: epsilon, by the Rényi accountant of Google's dp-accounting.

A round is one Poisson-sampled Gaussian mechanism: every client takes part with the chance q, on its own, and the sum of
updates no longer than C gets noise of standard deviation Z C. Two federations are neighbours if one client, with all of
its samples, is in one of them and not in the other; the sum then differs by at most C. Rényi divergences of rounds
add up, whatever a round has learned from those before, so the account depends on the number of rounds alone.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from fedloom.errors import InputError


class PrivacyAccountant:
    """Epsilon after any number of rounds."""

    def __init__(self, noise: float, chance: float, delta: float) -> None:
        """`noise` is Z, `chance` the probability q of a client to be drawn."""
        self.noise, self.chance, self.delta = noise, chance, delta

    def epsilon(self, rounds: int) -> float:
        """What `rounds` rounds have cost; infinite where there is no noise."""
        if rounds == 0:
            return 0.0
        if not self.noise:
            return math.inf
        orders, cost = self._round
        with _quiet():
            return float(_library().rdp.compute_epsilon(orders, rounds * cost, self.delta)[0])

    @cached_property
    def _round(self) -> tuple[Any, Any]:
        """The orders of the Rényi divergences, and what one round costs at each. The same for all rounds of a run."""
        library = _library()
        event = library.GaussianDpEvent(self.noise)
        if self.chance < 1:
            event = library.PoissonSampledDpEvent(self.chance, event)
        accountant = library.rdp.RdpAccountant()
        with _quiet():
            accountant.compose(event)
        return accountant.orders, accountant.rdp

    def rounds_within(self, most: float, planned: int) -> int:
        """How many of the planned rounds cost no more than `most`."""
        low, high = 0, planned
        while low < high:  # epsilon never falls from one round to the next
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.epsilon(middle) <= most else (low, middle - 1)
        return low


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise InputError(
            "noise is accounted for by the package dp-accounting, which is not installed; get it with: "
            "pip install 'fedloom[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the accountant's warnings: an order that it cannot compute is left out, which only costs tightness."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
