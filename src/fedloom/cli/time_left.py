"""Estimate the time left of one run or of a comparison."""

import time
from collections import deque
from statistics import fmean

RECENT_ROUNDS = 20
"""The speed of a run is that of its last so many rounds."""


class TimeLeft:
    """The time left of `runs` runs, where every `seeds` runs in a row have the same method.

    A future run takes as long as the runs of its method so far. A method that has not run yet takes the mean time of
    the others.
    """

    def __init__(self, runs: int, seeds: int) -> None:
        self._runs, self._seeds = runs, seeds
        self._finished_seconds: dict[int, list[float]] = {}
        """For each method, by its position, the seconds of its finished runs."""
        self._start(0, 0, 0)

    def start_run(self, number: int, rounds: int, done: int) -> None:
        """Start run `number` (from 1), of which `done` of the `rounds` rounds were finished before.

        A run may start again, after it ran out of memory.
        """
        if number != self._number and self._is_whole:
            # up to the start of the next run, so that building a run and writing its report count too
            self._finished_seconds.setdefault(self._method(self._number), []).append(time.monotonic() - self._started)
        self._start(number, rounds, done)

    def add_round(self, round: int) -> None:
        """Record that round `round` of the current run has ended."""
        self._round = round
        self._round_ends.append(time.monotonic())

    def estimate(self) -> float | None:
        """Return the seconds until all runs are finished, or None while nothing is known."""
        known = {method: fmean(seconds) for method, seconds in self._finished_seconds.items()}
        current, elapsed = self._method(self._number), time.monotonic() - self._started
        if len(self._round_ends) >= 3:
            round_seconds = (self._round_ends[-1] - self._round_ends[0]) / (len(self._round_ends) - 1)
            left = round_seconds * (self._rounds - self._round)
            known.setdefault(current, round_seconds * self._rounds)
        elif known:
            left = max(known.get(current, fmean(known.values())) - elapsed, 0.0)
        else:
            return None
        usual = fmean(known.values())
        return left + sum(known.get(self._method(run), usual) for run in range(self._number + 1, self._runs + 1))

    def _start(self, number: int, rounds: int, done: int) -> None:
        self._number, self._rounds, self._round = number, rounds, done
        self._is_whole = number > 0 and done == 0
        self._started = time.monotonic()
        self._round_ends: deque[float] = deque(maxlen=RECENT_ROUNDS)

    def _method(self, number: int) -> int:
        return (number - 1) // self._seeds
