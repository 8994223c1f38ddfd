"""Which client is trained next, where several are trained at once."""

import heapq
from collections.abc import Sequence

from fedloom.data import Federation
from fedloom.exchange import Job


def work_of(federation: Federation, job: Job) -> int:
    """How long a client will take, where that is known without making its samples."""
    known = type(federation).samples is not Federation.samples
    return federation.samples(job.client) if known else 1


class LargestFirst:
    """Which order to give next: the largest first, so that no long one starts last, within a window of the turns
    to come, so that finished answers never need more than `window` slots."""

    def __init__(self, sizes: Sequence[int], window: int) -> None:
        self._sizes = sizes
        self._window = window
        self._heap: list[tuple[int, int]] = []
        self._entered = 0
        self._deaths: dict[int, int] = {}
        self.delivered = 0

    def left(self) -> int:
        """How many have not been given out, in the window or after it."""
        return len(self._heap) + len(self._sizes) - self._entered

    def next(self) -> int | None:
        while self._entered < min(len(self._sizes), self.delivered + self._window):
            heapq.heappush(self._heap, (-self._sizes[self._entered], self._entered))
            self._entered += 1
        return heapq.heappop(self._heap)[1] if self._heap else None

    def again(self, index: int) -> int:
        """Its worker died: put it back, and say how often that has happened."""
        self._deaths[index] = self._deaths.get(index, 0) + 1
        self.put_back(index)
        return self._deaths[index]

    def put_back(self, index: int) -> None:
        """It was given out but not begun."""
        heapq.heappush(self._heap, (-self._sizes[index], index))

    def drop(self, index: int) -> None:
        """Give it up."""
        self._heap = [entry for entry in self._heap if entry[1] != index]
        heapq.heapify(self._heap)
