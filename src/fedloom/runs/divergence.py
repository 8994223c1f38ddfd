"""Divergence: stop a run whose updates are no longer finite."""

from collections.abc import Mapping
from typing import Any

PATIENCE = 3
"""Successive rounds with at least half of the updates non-finite after which a run stops."""


class DivergenceMonitor:
    """Count successive rounds in which at least half of the updates, or their training losses, are not finite."""

    def __init__(self) -> None:
        self._rounds = 0
        self._message = ""

    @property
    def message(self) -> str | None:
        """Return why the run must stop; None if it may continue."""
        return self._message if self._rounds >= PATIENCE else None

    def add_round(self, round: int, non_finite: int, received: int) -> None:
        """Add round `round`, counted from 1: of `received` updates, `non_finite` were not finite."""
        self._rounds = self._rounds + 1 if received and 2 * non_finite >= received else 0
        of = f"{non_finite} of {received} updates {'was' if received == 1 else 'were'} non-finite"
        self._message = f"training diverged in round {round}: {of}; lower --lr"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""
        return {"rounds": self._rounds, "message": self._message}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._rounds, self._message = state["rounds"], state["message"]
