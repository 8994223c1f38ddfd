"""One GPU of the CUDA engine: the samples on it, the slots that train there, and room for their answers."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.bank import Bank
from fedloom.data import PartitionedDataset, Samples
from fedloom.devices.cuda_runtime import empty_cuda_cache
from fedloom.engines.base import Engine
from fedloom.engines.cuda.slot import CudaSlot
from fedloom.engines.parallel import ResultSlots
from fedloom.models.layers.fused_relu import prepare_fused_relu
from fedloom.training.batches import Positions
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import EngineContext

log = logging.getLogger("fedloom")

RESULT_MEMORY = 8 << 30
"""Bytes for answers that wait for their turn."""


URGENT = 3
"""The first slots go before the others, the first of all by this much, and each after it by one less."""


@dataclass(frozen=True)
class PendingUpdate:
    """A client's training that is on its way; what it holds is there once `ready` has happened."""

    gpu: "CudaDevice"
    place: int
    samples: int
    steps: int
    words: tuple[Tensor, list[int]]
    """What `SlotBench.last_words` says."""
    ready: Any

    def wait(self) -> tuple[float, bool]:
        """Wait for it, and say what the mean loss of its last epoch was, and whether all in it is known to be finite.

        Numbers may be finite whose sum is not: then somebody has to look.
        """
        if self.ready is not None:
            self.ready.synchronize()
        words, sizes = self.words
        finite = isfinite(float(words[-1]))
        if not sizes:
            return float("nan"), finite
        return float(words[:-1].double() @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes), finite


class CudaDevice:
    """Slots on one device; on a CPU the same without recordings, one step after the other, for tests."""

    def __init__(self, shop: EngineContext, device: torch.device, most: int, *, first: bool = True) -> None:
        self.device = device
        self.most = most
        """Slots there may be."""
        self.slots: list[CudaSlot] = []
        self.free: list[int] = []
        """Places that hold no answer."""
        self._shop = shop
        # Slots of one GPU share frozen weights; another GPU needs its own, and its own of a loss that has weights.
        self._workshop = shop.workshop if first else _copied(shop.workshop, device)
        prepare_fused_relu(self._workshop.module, device)
        self._results: ResultSlots | None = None
        self._pool: Samples | None = None
        if isinstance(shop.federation, PartitionedDataset):
            pool = shop.federation.pool
            try:
                self._pool = Samples(pool.x.to(device), pool.y.to(device))
            except torch.OutOfMemoryError:
                self._tell_of_samples()

    def add_slots(self, wanted: int) -> None:
        """Have as many slots as are wanted, or as there is memory for."""
        while len(self.slots) < min(self.most, wanted):
            try:
                # The largest clients go to the first slots. Were they served like all others, they would be left over
                # in the end, too few to fill the GPU.
                self.slots.append(CudaSlot(self._workshop, self.device, max(0, URGENT - len(self.slots))))
            except torch.OutOfMemoryError:
                if self.slots or not self._send_samples_away():
                    self.most = len(self.slots)

    def drop(self, slot: CudaSlot) -> bool:
        """Go on with one slot less: there is no memory for all of them. False: with the last, but without the samples,
        which are brought here with their clients from now on."""
        self.synchronize()
        for one in self.slots:
            one.tape.cool_down()  # a kernel that found no memory is forgotten, and cannot be loaded in a recording
        if self.slots == [slot] and self._send_samples_away():
            return False
        self.slots.remove(slot)
        self.most = len(self.slots)
        slot.close()
        empty_cuda_cache()
        return True

    def _send_samples_away(self) -> bool:
        """Let samples be brought here with their clients, where all of them lie here; says whether they did."""
        if self._pool is None:
            return False
        self._pool = None
        empty_cuda_cache()
        self._tell_of_samples()
        return True

    def _tell_of_samples(self) -> None:
        log.warning("%s has no room for all samples: those of each client are brought there for its work", self.device)

    def make_room(self, jobs: int) -> int:
        """Have memory for answers, one place for each job, or as many as there is room for; says how many."""
        shop = self._workshop

        def make(count: int, width: int) -> Bank:
            return Engine.make_bank(count, width, shop.layout.dtype, self.device)

        if self._results is None or len(self._results) < jobs:
            one = ResultSlots(1, shop, make).bank.rows
            most = max(2 * self.most, RESULT_MEMORY // (one.stride(0) * one.element_size()))
            count = min(jobs, most)
            if self._results is not None and len(self._results) < count:
                self._results = None  # before there is more room, not after it
            while self._results is None:
                try:
                    self._results = ResultSlots(count, shop, make)
                except torch.OutOfMemoryError:
                    if count <= 1:
                        raise
                    count = ceil(count / 2)
        self.free = list(range(len(self._results)))
        return len(self.free)

    def samples_of(self, slot: CudaSlot, client: int) -> tuple[Samples, Positions]:
        """Where a client's samples lie on the device."""
        federation = self._shop.federation
        if self._pool is not None and isinstance(federation, PartitionedDataset):
            return self._pool, federation.parts[client]
        samples = federation.client(client)
        return slot.bring(samples), np.arange(len(samples))

    def keep(self, place: int, row: Tensor, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put an answer into its place."""
        assert self._results is not None, "there is room since the round began"
        self._results.row(place).copy_(row)
        for group, tensors in groups.items():
            for name, target in self._results.group(place, group).items():
                target.copy_(tensors[name])

    def answer(self, place: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """What lies there: a row, what goes up beside it, what stays at home."""
        assert self._results is not None, "there is room since the round began"
        return self._results.row(place), self._results.group(place, "uploads"), self._results.group(place, "home")

    def mark(self) -> Any:
        """An event in the current stream of this GPU; None where there are no streams."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait for all that it has been asked to do. Not for the whole GPU: others may be recording on it."""
        for slot in self.slots:
            slot.tape.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give back all memory; work that nobody waited for ends before."""
        self.synchronize()
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self._results = self._pool = None


def _copied(shop: TrainingContext, device: torch.device) -> TrainingContext:
    criterion = shop.criterion
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).to(device)
    return replace(shop, module=copy.deepcopy(shop.module), criterion=criterion)
