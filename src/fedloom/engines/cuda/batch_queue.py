"""The batches of steps to come, laid out on the device before they are taken.

A recorded step cannot cut its batch on the host, and gathering and normalising it there takes seven short kernels. So
the batches of many steps are gathered and prepared in one go, one batch a row, and a counter on the device says whose
turn it is: steps read their rows, note their losses in the same places, and move the counter on.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedloom.data import Samples
from fedloom.training.batches import Batch, Positions

STOCK_BYTES = 32 << 20
"""What prepared inputs may take in each slot, unless one batch alone takes more."""

MOST_STEPS = 1024
"""Batches laid out at once, however small they are."""

TAKEN_BYTES = 16 << 20
"""What inputs of steps may take that are taken at once."""

ALIGNED = 16
"""Fast kernels read so many bytes at a time."""


class BatchQueue:
    """Room for some batches. `ready` prepares samples; the room itself stays where it is, so that steps can be
    recorded."""

    def __init__(self, device: torch.device, ready: Callable[[Tensor], Tensor], *, channels_last: bool) -> None:
        self._device, self._ready, self._channels_last = device, ready, channels_last
        self._x = self._y = torch.empty(0, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._ahead = torch.arange(MOST_STEPS, device=device)
        self._losses = torch.zeros(MOST_STEPS, device=device)
        self._prepared: dict[tuple[torch.dtype, torch.Size], tuple[torch.dtype, tuple[int, ...]]] = {}

    @property
    def places(self) -> list[Tensor]:
        """Everything that a recording reads or writes here."""
        return [self._x, self._y, self._turn, self._losses]

    @property
    def changing(self) -> list[Tensor]:
        """What a step changes."""
        return [self._turn, self._losses]

    def prepare(self, store: Samples, largest: int, batch_size: int) -> int:
        """Have rows for batches of at most `largest` samples like those of `store`; how many batches fit."""
        stored = store.x.dtype, store.x.shape[1:]
        if stored not in self._prepared:  # clients of one run may have samples of different shapes
            probe = self._in_order(self._ready(store.x[:1]))
            self._prepared[stored] = probe.dtype, tuple(probe.shape[1:])
        kind, shape = self._prepared[stored]
        sample_bytes = max(1, prod(shape) * kind.itemsize)
        # One width for clients of all sizes, where that is possible: a recording depends on it.
        width = batch_size if largest <= batch_size <= STOCK_BYTES // sample_bytes else largest
        rows = min(MOST_STEPS, max(1, STOCK_BYTES // (width * sample_bytes)))
        self._x = self._shaped(self._x, kind, (rows, width, *shape))
        self._y = self._shaped(self._y, store.y.dtype, (rows, width, *store.y.shape[1:]))
        return rows

    def _shaped(self, now: Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The same room as rows of another width, or more room if that is too little."""
        if now.shape == shape and now.dtype is kind:
            return now
        wanted, flat = prod(shape), now.as_strided((now.untyped_storage().nbytes() // now.itemsize,), (1,), 0)
        if len(flat) < wanted or flat.dtype is not kind:
            least = STOCK_BYTES // kind.itemsize if len(shape) > 2 else MOST_STEPS
            flat = torch.empty(max(wanted, least), dtype=kind, device=self._device)
        return flat[:wanted].view(shape)

    def fill(self, store: Samples, batches: Sequence[Positions]) -> None:
        """Lay out these batches, and let the first be the next."""
        width = self._x.shape[1]
        table = np.zeros((len(batches), width), dtype=np.int64)  # a row that is not full is filled with any sample
        for row, batch in zip(table, batches, strict=True):
            row[: len(batch)] = batch
        at = torch.from_numpy(table).view(-1)
        if self._device.type == "cuda":
            at = at.pin_memory().to(self._device, non_blocking=True)
        x = self._in_order(self._ready(store.x.index_select(0, at)))
        self._x[: len(batches)].copy_(x.reshape(len(batches), *self._x.shape[1:]))
        y = store.y.index_select(0, at)
        self._y[: len(batches)].copy_(y.view(len(batches), *self._y.shape[1:]))
        self._turn.zero_()

    def _in_order(self, x: Tensor) -> Tensor:
        """As it lies in memory."""
        return x.permute(0, 2, 3, 1) if self._channels_last and x.ndim == 4 else x

    def turns(self, count: int) -> Tensor:
        """The places of the next batches."""
        return self._turn if count == 1 else self._turn + self._ahead[:count]

    def take(self, size: int, turns: Tensor) -> Iterator[Batch]:
        """The batches in these places, of which it is known how large they are.

        Several are copied at once, which is one kernel instead of one for each, as long as they are small and each lies
        where fast kernels can read it.
        """
        x, y = self._x[:, :size], self._y[:, :size]
        bytes_each = x[0].numel() * x.itemsize
        at_once = max(1, TAKEN_BYTES // max(1, bytes_each)) if bytes_each % ALIGNED == 0 else 1
        for places in torch.split(turns, at_once):
            for images, labels in zip(x.index_select(0, places), y.index_select(0, places), strict=True):
                # `.data`: autograd would not let a network change one of several views in place.
                images = images.permute(0, 3, 1, 2) if self._channels_last and images.ndim == 4 else images
                yield Batch(images.data, labels.data)

    def note(self, turns: Tensor, losses: Sequence[Tensor]) -> None:
        """These were the losses of the batches that were taken from there; the turn is the next one's."""
        found = [loss.float().view(1) for loss in losses]
        self._losses.index_copy_(0, turns, found[0] if len(found) == 1 else torch.cat(found))
        self._turn.add_(len(found))

    def losses(self, first: int, count: int) -> Tensor:
        """A copy of the losses that were noted since the last `fill`, those of so many batches."""
        return self._losses[first:count].clone()
