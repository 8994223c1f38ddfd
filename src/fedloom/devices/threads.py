"""The number of threads of torch while engines compute."""

import threading

import torch

_LOCK = threading.Lock()
_held = 0
_before = 0


class SingleThread:
    """Let torch compute with one thread until `release`, because more threads round sums differently.

    Runs in several threads may overlap. Each restores the number of threads from before the first of them, or to which
    it was set since.
    """

    def __init__(self) -> None:
        global _held, _before
        with _LOCK:
            if not _held or torch.get_num_threads() != 1:
                _before = torch.get_num_threads()
            _held += 1
            self._before: int | None = _before
        torch.set_num_threads(1)

    def release(self) -> None:
        """Restore the number of threads; a second call does nothing."""
        global _held
        with _LOCK:
            before, self._before = self._before, None
            if before is None:
                return
            _held -= 1
        torch.set_num_threads(before)
