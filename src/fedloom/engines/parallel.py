"""Which client is trained next, where several are trained at once."""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom.core.bank import Bank, aligned_row_stride
from fedloom.core.tasks import ClientTask
from fedloom.data import FederatedDataset
from fedloom.training.context import TrainingContext


def estimate_client_work(federation: FederatedDataset, job: ClientTask) -> int:
    """How long a client will take, where that is known without making its samples."""
    known = type(federation).samples is not FederatedDataset.samples
    return federation.samples(job.client) if known else 1


class LargestFirstQueue:
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


class ResultSlots:
    """Memory for clients' answers: for each slot a row, what its client keeps, and what it sends up. It is shared by
    processes unless `make_bank` makes it."""

    def __init__(
        self, count: int, workshop: TrainingContext, make_bank: Callable[[int, int], Bank] | None = None
    ) -> None:
        layout = workshop.layout
        self._fields: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {"home": {}, "uploads": {}}
        self._size = layout.size
        end = aligned_row_stride(layout.size, layout.dtype)
        for group, shapes in (("home", workshop.home), ("uploads", workshop.uploads)):
            for name, shape in shapes.items():
                self._fields[group][name] = (end, shape)
                end += aligned_row_stride(torch.Size(shape).numel(), layout.dtype)
        self.bank = make_bank(count, end) if make_bank else Bank.shared(count, end, layout.dtype)

    def __len__(self) -> int:
        return len(self.bank)

    def row(self, slot: int) -> Tensor:
        return self.bank.rows[slot, : self._size]

    def group(self, slot: int, group: str) -> dict[str, Tensor]:
        """The tensors of one group, `home` or `uploads`, in this slot."""
        return {
            name: self.bank.rows[slot, start : start + torch.Size(shape).numel()].view(shape)
            for name, (start, shape) in self._fields[group].items()
        }
