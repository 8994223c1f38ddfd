"""One GPU of the CUDA engine: its samples, slots and memory for results."""

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

log = logging.getLogger("fedloom")

RESULT_MEMORY = 8 << 30
"""Bytes for results that wait for their turn."""


URGENT = 3
"""Stream priority of the first slot. Each slot after it has one less, down to 0."""


@dataclass(frozen=True)
class CudaDeviceUpdate:
    """A client's update on its way. Its tensors are valid once `ready` has happened."""

    gpu: "CudaDevice"
    result_slot: int
    num_examples: int
    steps: int
    final_values: tuple[Tensor, list[int]]
    """The result of `CudaSlot.final_values`."""
    ready: Any

    def wait(self) -> tuple[float, bool]:
        """Wait, and return the mean loss of the last epoch and whether all values are known to be finite.

        A sum of finite values may overflow; the caller must then check them.
        """
        if self.ready is not None:
            self.ready.synchronize()
        final_values, sizes = self.final_values
        finite = isfinite(float(final_values[-1]))
        if not sizes:
            return float("nan"), finite
        return float(final_values[:-1].double() @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes), finite


class CudaDevice:
    """Slots on one device. On a CPU, for tests, steps run one after the other, without graphs."""

    def __init__(self, context: TrainingContext, device: torch.device, max_slots: int, *, first: bool = True) -> None:
        self.device = device
        self.max_slots = max_slots
        """Maximum number of slots."""
        self.slots: list[CudaSlot] = []
        self.free_result_slots: list[int] = []
        """Result slots without a result."""
        self._context = context
        # Slots of one GPU share frozen weights. Another GPU needs copies of them, and of a loss that has weights.
        self._training_context = context if first else _copied(context, device)
        prepare_fused_relu(self._training_context.model, device)
        self._results: ResultSlots | None = None
        self._pool: Samples | None = None
        if isinstance(context.data, PartitionedDataset):
            pool = context.data.pool
            try:
                self._pool = Samples(pool.x.to(device), pool.y.to(device))
            except torch.OutOfMemoryError:
                self._warn_about_samples()

    def add_slots(self, wanted: int) -> None:
        """Add slots until there are as many as wanted, or memory runs out."""
        while len(self.slots) < min(self.max_slots, wanted):
            try:
                # The first slots get the largest clients. With equal priority these would finish last, too few to fill
                # the GPU.
                self.slots.append(CudaSlot(self._training_context, self.device, max(0, URGENT - len(self.slots))))
            except torch.OutOfMemoryError:
                if self.slots or not self._drop_samples():
                    self.max_slots = len(self.slots)

    def drop_slot(self, slot: CudaSlot) -> bool:
        """Drop a slot and return True. The last one drops the samples first, if they are here, and returns False."""
        self.synchronize()
        for one in self.slots:
            one.graph_runner.reset_warmup()  # kernels dropped for lack of memory cannot be loaded in a capture
        if self.slots == [slot] and self._drop_samples():
            return False
        self.slots.remove(slot)
        self.max_slots = len(self.slots)
        slot.close()
        empty_cuda_cache()
        return True

    def _drop_samples(self) -> bool:
        """Drop the samples here; each client's are then copied when it trains. Return whether there were any."""
        if self._pool is None:
            return False
        self._pool = None
        empty_cuda_cache()
        self._warn_about_samples()
        return True

    def _warn_about_samples(self) -> None:
        log.warning("%s has no room for all samples: those of each client are brought there for its work", self.device)

    def allocate_results(self, num_tasks: int) -> int:
        """Allocate a result slot for each task, or as many as fit; return how many."""
        training_context = self._training_context

        def make(count: int, width: int) -> Bank:
            return Engine.make_bank(count, width, training_context.layout.dtype, self.device)

        if self._results is None or len(self._results) < num_tasks:
            one = ResultSlots(1, training_context, make).bank.rows
            max_results = max(2 * self.max_slots, RESULT_MEMORY // (one.stride(0) * one.element_size()))
            count = min(num_tasks, max_results)
            if self._results is not None and len(self._results) < count:
                self._results = None  # before the larger one is allocated
            while self._results is None:
                try:
                    self._results = ResultSlots(count, training_context, make)
                except torch.OutOfMemoryError:
                    if count <= 1:
                        raise
                    count = ceil(count / 2)
        self.free_result_slots = list(range(len(self._results)))
        return len(self.free_result_slots)

    def client_samples(self, slot: CudaSlot, client_id: int) -> tuple[Samples, Positions]:
        """Return samples on the device, and the indices of a client's own."""
        federated_data = self._context.data
        if self._pool is not None and isinstance(federated_data, PartitionedDataset):
            return self._pool, federated_data.client_indices[client_id]
        samples = federated_data.client_samples(client_id)
        return slot.copy_samples(samples), np.arange(len(samples))

    def save_result(self, result_slot: int, row: Tensor, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy a result into its slot."""
        assert self._results is not None, "there is room since the round began"
        self._results.row(result_slot).copy_(row)
        for group, tensors in groups.items():
            for name, target in self._results.group(result_slot, group).items():
                target.copy_(tensors[name])

    def load_result(self, result_slot: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the row, the uploads and the client state in a result slot."""
        assert self._results is not None, "there is room since the round began"
        return (
            self._results.row(result_slot),
            self._results.group(result_slot, "uploads"),
            self._results.group(result_slot, "client_state"),
        )

    def record_event(self) -> Any:
        """Return an event in the current stream of this GPU; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def synchronize(self) -> None:
        """Wait for all enqueued work here, but not for the whole GPU: others may be capturing on it."""
        for slot in self.slots:
            slot.graph_runner.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Wait for pending work, and release all memory."""
        self.synchronize()
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self._results = self._pool = None


def _copied(context: TrainingContext, device: torch.device) -> TrainingContext:
    criterion = context.criterion
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).to(device)
    return replace(context, model=copy.deepcopy(context.model), criterion=criterion)
