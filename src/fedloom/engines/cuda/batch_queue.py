"""Batches of the next steps, prepared on the device.

A captured step cannot cut its batch on the host, and gathering and normalizing a batch takes seven short kernels. So
the batches of many steps are gathered and transformed at once, one batch per row. A counter on the device says which is
next: steps read their rows, write their losses to the same places, and advance the counter.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedloom.data import Samples
from fedloom.training.batches import Batch, Positions

BATCH_QUEUE_BYTES = 32 << 20
"""Bytes that prepared inputs may take in each slot, unless one batch alone takes more."""

MOST_STEPS = 1024
"""Maximum number of batches prepared at once, however small they are."""

TAKEN_BYTES = 16 << 20
"""Bytes of inputs that are taken at once."""

ALIGNED = 16
"""Bytes that fast kernels read at a time."""


class BatchQueue:
    """Memory for some batches. It keeps its addresses, so that steps can be captured. `transform` prepares samples."""

    def __init__(self, device: torch.device, transform: Callable[[Tensor], Tensor], *, channels_last: bool) -> None:
        self._device, self._transform, self._channels_last = device, transform, channels_last
        self._x = self._y = torch.empty(0, device=device)
        self._queue_index = torch.zeros(1, dtype=torch.int64, device=device)
        self._offsets = torch.arange(MOST_STEPS, device=device)
        self._losses = torch.zeros(MOST_STEPS, device=device)
        self._transformed: dict[tuple[torch.dtype, torch.Size], tuple[torch.dtype, tuple[int, ...]]] = {}

    @property
    def graph_tensors(self) -> list[Tensor]:
        """Return all tensors here that a graph reads or writes."""
        return [self._x, self._y, self._queue_index, self._losses]

    @property
    def changing_tensors(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [self._queue_index, self._losses]

    def allocate(self, store: Samples, largest: int, batch_size: int) -> int:
        """Make room for batches of at most `largest` samples like those of `store`; return how many fit."""
        stored = store.x.dtype, store.x.shape[1:]
        if stored not in self._transformed:  # clients of one run may have samples of different shapes
            probe = self._in_order(self._transform(store.x[:1]))
            self._transformed[stored] = probe.dtype, tuple(probe.shape[1:])
        kind, shape = self._transformed[stored]
        sample_bytes = max(1, prod(shape) * kind.itemsize)
        # One width for clients of all sizes, if possible: graphs depend on it.
        width = batch_size if largest <= batch_size <= BATCH_QUEUE_BYTES // sample_bytes else largest
        rows = min(MOST_STEPS, max(1, BATCH_QUEUE_BYTES // (width * sample_bytes)))
        self._x = self._shaped(self._x, kind, (rows, width, *shape))
        self._y = self._shaped(self._y, store.y.dtype, (rows, width, *store.y.shape[1:]))
        return rows

    def _shaped(self, now: Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the same memory as rows of another width, or new memory if that is too small."""
        if now.shape == shape and now.dtype is kind:
            return now
        wanted, flat = prod(shape), now.as_strided((now.untyped_storage().nbytes() // now.itemsize,), (1,), 0)
        if len(flat) < wanted or flat.dtype is not kind:
            least = BATCH_QUEUE_BYTES // kind.itemsize if len(shape) > 2 else MOST_STEPS
            flat = torch.empty(max(wanted, least), dtype=kind, device=self._device)
        return flat[:wanted].view(shape)

    def fill(self, store: Samples, batches: Sequence[Positions]) -> None:
        """Prepare these batches, and make the first one the next."""
        width = self._x.shape[1]
        table = np.zeros((len(batches), width), dtype=np.int64)  # any sample fills up a row
        for row, batch in zip(table, batches, strict=True):
            row[: len(batch)] = batch
        at = torch.from_numpy(table).view(-1)
        if self._device.type == "cuda":
            at = at.pin_memory().to(self._device, non_blocking=True)
        x = self._in_order(self._transform(store.x.index_select(0, at)))
        self._x[: len(batches)].copy_(x.reshape(len(batches), *self._x.shape[1:]))
        y = store.y.index_select(0, at)
        self._y[: len(batches)].copy_(y.view(len(batches), *self._y.shape[1:]))
        self._queue_index.zero_()

    def _in_order(self, x: Tensor) -> Tensor:
        """Return x with its axes in memory order."""
        return x.permute(0, 2, 3, 1) if self._channels_last and x.ndim == 4 else x

    def queue_indices(self, count: int) -> Tensor:
        """Return the indices of the next batches."""
        return self._queue_index if count == 1 else self._queue_index + self._offsets[:count]

    def take(self, size: int, queue_indices: Tensor) -> Iterator[Batch]:
        """Yield the batches at these indices, each with `size` samples.

        Several are copied at once, which is one kernel instead of one for each, if they are small and each starts where
        fast kernels can read it.
        """
        x, y = self._x[:, :size], self._y[:, :size]
        bytes_each = x[0].numel() * x.itemsize
        at_once = max(1, TAKEN_BYTES // max(1, bytes_each)) if bytes_each % ALIGNED == 0 else 1
        for places in torch.split(queue_indices, at_once):
            for images, labels in zip(x.index_select(0, places), y.index_select(0, places), strict=True):
                # `.data`: autograd forbids a network to change one of several views in place.
                images = images.permute(0, 3, 1, 2) if self._channels_last and images.ndim == 4 else images
                yield Batch(images.data, labels.data)

    def record_losses(self, queue_indices: Tensor, losses: Sequence[Tensor]) -> None:
        """Store the losses of the batches at these indices, and advance the counter."""
        found = [loss.float().view(1) for loss in losses]
        self._losses.index_copy_(0, queue_indices, found[0] if len(found) == 1 else torch.cat(found))
        self._queue_index.add_(len(found))

    def losses(self, first: int, count: int) -> Tensor:
        """Return a copy of the losses since the last `fill`, from batch `first` up to `count`."""
        return self._losses[first:count].clone()
