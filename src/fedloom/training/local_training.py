"""ClientStates, EngineContext, train_client, evaluate_client: the same in every engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.evaluation import evaluation_slices
from fedloom.core.tasks import ClientTask, Shapes
from fedloom.data import FederatedDataset, Samples
from fedloom.devices.cuda_runtime import DEVICE_ERROR, is_out_of_memory_error
from fedloom.training.context import TrainingContext
from fedloom.training.trainer import LocalSteps, LocalTrainer

Train = Callable[[LocalTrainer], Iterator[LocalSteps]]
"""A `Local`'s train."""


CLIENT_STATE_BYTES = 4 << 30
"""Bytes on a GPU for what clients keep; what is more is kept by the host."""


class ClientStates:
    """What clients keep between rounds. Only clients that have been seen take up memory."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.device = torch.device("cpu")
        """Where it is kept, as long as there is little of it."""
        numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._most = CLIENT_STATE_BYTES // max(1, numbers * dtype.itemsize)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self.changed: set[int] = set()
        """Clients whose state changed since it was last saved."""

    def __contains__(self, client: int) -> bool:
        return client in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def clients(self) -> list[int]:
        """Those that keep something, in order."""
        return sorted(self._kept)

    def get(self, client: int) -> Mapping[str, Tensor]:
        """What `client` keeps; empty when it has not been seen (then it starts from zeros)."""
        return self._kept.get(client, {})

    def copy_for(self, client: int, device: torch.device) -> dict[str, Tensor]:
        """A copy of what `client` keeps, zeros where that is nothing yet, to work with on `device`."""
        kept = self.get(client)
        zeros = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shapes.items()}
        return {name: kept.get(name, zero).to(device, copy=True) for name, zero in zeros.items()}

    def keep(self, client: int, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the client's state."""
        if not self.shapes:
            return
        mine = self._kept.setdefault(client, {})
        for name, value in values.items():
            if name in mine:
                mine[name].copy_(value)
            else:
                mine[name] = value.detach().to(self.device if len(self._kept) <= self._most else "cpu", copy=True)
        self.changed.add(client)


@dataclass(frozen=True)
class EngineContext:
    """Everything an engine needs to train clients: the benches' workshop, the samples, the method's `train`."""

    workshop: TrainingContext
    federation: FederatedDataset
    train: Train
    homes: ClientStates
    personal: Train | None = None
    """A `Local`'s personal; None where clients have no models of their own."""
    train_apart: Callable[[], Train] | None = None
    """Makes the `train` of another `Local`: where clients train at once in one process, what one of them leaves on its
    `Local` must not be the other's."""


def train_client(
    bench: LocalTrainer,
    shop: EngineContext,
    round: int,
    client: int,
    row: Tensor,
    received: Tensor,
    extras: Mapping[str, Tensor],
    home: dict[str, Tensor],
    uploads: dict[str, Tensor],
    first_visit: bool,
) -> tuple[int, float, int]:
    """One client's work from begin to end, alike in every engine: (samples, loss, steps)."""
    samples = shop.federation.client(client)
    places = {"home": dict(home), "uploads": dict(uploads)}
    with shop.workshop.streams.globally("noise", round, client, bench.device):
        bench.begin(round, client, samples, row, received, extras, home, uploads, first_visit)
        for piece in shop.train(bench):
            bench.run(piece)
        bench.finish()
    finish_client_update(bench, row, places)
    return bench.samples, bench.mean_loss, bench.steps


def evaluate_client(
    bench: LocalTrainer,
    shop: EngineContext,
    round: int,
    client: int,
    row: Tensor,
    received: Tensor,
    home: dict[str, Tensor],
    first_visit: bool,
) -> float | None:
    """The accuracy of one client's own model, alike in every engine. `home` is a copy: nothing of this is kept."""
    samples = shop.federation.client(client)
    test, counts = _test_of(shop.federation, client, samples)
    if shop.personal is None or not len(test):
        return None
    with shop.workshop.streams.globally("noise", round, client, bench.device):
        bench.begin(round, client, samples, row, received, {}, home, {}, first_visit)
        for piece in shop.personal(bench):
            bench.run(piece)
        if bench.steps and bench.training.statistics == "estimated":
            bench.estimate_statistics()
    pieces = [bench.score(bench.row, test[chunk]) for chunk in evaluation_slices(test)]
    return sum(pieces[1:], start=pieces[0]).accuracy_for(counts)


def _test_of(federation: FederatedDataset, client: int, samples: Samples) -> tuple[Samples, NDArray[np.int64]]:
    """What a client's own model is tested on, and how often each class counts."""
    test = federation.test
    assert test is not None, "clients are scored only where there is a test set"
    owners = federation.test_owners
    if owners is not None:
        own = test.take(np.flatnonzero(owners == client))
        return own, np.bincount(own.y.cpu().numpy(), minlength=federation.classes)
    # Other classes would not count, and a client that has two of ten is scored five times as fast without them.
    counts = np.bincount(samples.y.cpu().numpy(), minlength=federation.classes)
    return test.take(np.flatnonzero(counts[test.y.cpu().numpy()])), counts


def evaluate_clients_in_turn(
    bench: LocalTrainer, shop: EngineContext, homes: ClientStates, round: int, jobs: Sequence[ClientTask]
) -> list[float | None]:
    """`Engine.score_clients` with one bench."""
    row, found = shop.workshop.layout.empty(bench.device), list[float | None]()
    for job in jobs:
        home, new = homes.copy_for(job.client, bench.device), job.client not in homes
        try:
            received = job.row.to(bench.device)
            found.append(evaluate_client(bench, shop, round, job.client, row, received, home, new))
        except (Exception, SystemExit) as error:  # as in training, a client that fails is left out
            if isinstance(error, DEVICE_ERROR) or is_out_of_memory_error(error):  # that is not the client's fault
                raise
            found.append(None)
    return found


def finish_client_update(bench: LocalTrainer, row: Tensor, places: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Bring a client's results to where they belong, in case the method put other tensors on the bench."""
    _fill("row", row, bench.row)
    for group, now in (("home", bench.home), ("uploads", bench.uploads)):
        if places[group].keys() != now.keys():
            raise ValueError(f"{group} holds {sorted(now)}, but {sorted(places[group])} was declared")
        for name, place in places[group].items():
            _fill(f"{group}[{name!r}]", place, now[name])


def _fill(name: str, place: Tensor, value: Tensor) -> None:
    if value is place:
        return
    if value.shape != place.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {tuple(place.shape)} was expected")
    place.copy_(value)
