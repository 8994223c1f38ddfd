"""Order and result memory of clients in engines that train several at once."""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedloom.core.bank import Bank, aligned_row_stride
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import FederatedDataset
from fedloom.training.context import TrainingContext


def estimate_client_work(federated_data: FederatedDataset, task: ClientTask) -> int:
    """Return a client's number of samples, or 1 if its samples would have to be loaded to count them.

    Held-out clients, whose ids follow those of the training clients, count as 1 too.
    """
    known = type(federated_data).num_examples is not FederatedDataset.num_examples
    return federated_data.num_examples(task.client_id) if known and task.client_id < len(federated_data) else 1


class LargestFirstQueue:
    """Return indices of tasks, the largest first, so that no long training starts last.

    Only the next `max_ahead` undelivered tasks may start, so results never need more than `max_ahead` slots.
    """

    def __init__(self, sizes: Sequence[int], max_ahead: int) -> None:
        self._sizes = sizes
        self._max_ahead = max_ahead
        self._heap: list[tuple[int, int]] = []
        self._num_entered = 0
        self._deaths: dict[int, int] = {}
        self.num_delivered = 0

    def num_waiting(self) -> int:
        """Return how many tasks have not started."""
        return len(self._heap) + len(self._sizes) - self._num_entered

    def next(self) -> int | None:
        """Return the index of the next task, or None if none may start now."""
        while self._num_entered < min(len(self._sizes), self.num_delivered + self._max_ahead):
            heapq.heappush(self._heap, (-self._sizes[self._num_entered], self._num_entered))
            self._num_entered += 1
        return heapq.heappop(self._heap)[1] if self._heap else None

    def put_back_after_death(self, index: int) -> int:
        """Put back a task whose worker died, and return how often that has happened to it."""
        self._deaths[index] = self._deaths.get(index, 0) + 1
        self.put_back(index)
        return self._deaths[index]

    def put_back(self, index: int) -> None:
        """Put back a task that did not start."""
        heapq.heappush(self._heap, (-self._sizes[index], index))

    def drop(self, index: int) -> None:
        """Remove a task."""
        self._heap = [entry for entry in self._heap if entry[1] != index]
        heapq.heapify(self._heap)


class ResultSlots:
    """Hold results of clients. Each slot has a row, the client state and the uploads.

    Processes share this memory, unless `make_bank` allocates it.
    """

    def __init__(
        self, count: int, context: TrainingContext, make_bank: Callable[[int, int], Bank] | None = None
    ) -> None:
        layout = context.layout
        self._fields: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {"client_state": {}, "uploads": {}}
        self._size = layout.size
        end = aligned_row_stride(layout.size, layout.dtype)
        for group, shapes in (("client_state", context.client.state_shapes), ("uploads", context.client.upload_shapes)):
            for name, shape in shapes.items():
                self._fields[group][name] = (end, shape)
                end += aligned_row_stride(torch.Size(shape).numel(), layout.dtype)
        self.bank = make_bank(count, end) if make_bank else Bank.shared(count, end, layout.dtype)

    def __len__(self) -> int:
        return len(self.bank)

    def memory(self, slot: int, first_visit: bool) -> TaskMemory:
        """Return a slot as the memory of a task."""
        return TaskMemory(self.row(slot), self.group(slot, "client_state"), self.group(slot, "uploads"), first_visit)

    def row(self, slot: int) -> Tensor:
        return self.bank.rows[slot, : self._size]

    def group(self, slot: int, group: str) -> dict[str, Tensor]:
        """Return the tensors of one group, `client_state` or `uploads`, in this slot."""
        return {
            name: self.bank.rows[slot, start : start + torch.Size(shape).numel()].view(shape)
            for name, (start, shape) in self._fields[group].items()
        }
