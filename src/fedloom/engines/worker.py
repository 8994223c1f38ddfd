"""One worker process of the host engine: it trains the clients and scores the pieces it is told to.

It was forked from the coordinator, so it has the module, the loss, the samples and the method as they were there,
whatever they are, without anything having been pickled. Rows pass through shared memory; only small records pass
through the pipe.
"""

import gc
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedloom.banks import Bank, at_address, stride_of
from fedloom.bench import Bench, Workshop
from fedloom.engines.base import Shop, reason_of, score_client, train_client
from fedloom.processes import die_with_parent, keep_freed_memory
from fedloom.rows import all_finite
from fedloom.scores import Score, score_chunks


@dataclass(frozen=True)
class Place:
    """Where in shared memory a tensor lies."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return at_address(self.address, self.shape, self.dtype)


@dataclass(frozen=True)
class TrainOrder:
    """Train one client in one slot."""

    index: int
    round: int
    client: int
    slot: int
    row: Place
    extras: tuple[tuple[str, Place], ...]
    first_visit: bool


@dataclass(frozen=True)
class ScoreOrder:
    """Score a model on one piece of the test set."""

    index: int
    row: Place


@dataclass(frozen=True)
class PersonalOrder:
    """Score one client's own model, which is made in a slot."""

    index: int
    round: int
    client: int
    slot: int
    row: Place
    first_visit: bool


@dataclass(frozen=True)
class Trained:
    index: int
    samples: int
    loss: float
    steps: int
    finite: bool
    """Whether all of it is: a worker that has just written it looks through it faster than the coordinator can."""


@dataclass(frozen=True)
class Failed:
    index: int
    reason: str


@dataclass(frozen=True)
class Scored:
    index: int
    score: Score


@dataclass(frozen=True)
class Fared:
    index: int
    accuracy: float | None


CANNOT_TRAIN = 77
"""Exit code of a worker in which autograd does not work: torch's threads for GPUs do not survive a fork."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Held back while a worker is forked: Python loses what is raised in its fork hooks, and the child has our handlers."""

Order = TrainOrder | ScoreOrder | PersonalOrder
Reply = Trained | Failed | Scored | Fared


class Slots:
    """Memory for clients' answers: for each slot a row, what its client keeps, and what it sends up. It is shared by
    processes unless `make_bank` makes it."""

    def __init__(self, count: int, workshop: Workshop, make_bank: Callable[[int, int], Bank] | None = None) -> None:
        layout = workshop.layout
        self._fields: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {"home": {}, "uploads": {}}
        self._size = layout.size
        end = stride_of(layout.size, layout.dtype)
        for group, shapes in (("home", workshop.home), ("uploads", workshop.uploads)):
            for name, shape in shapes.items():
                self._fields[group][name] = (end, shape)
                end += stride_of(torch.Size(shape).numel(), layout.dtype)
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


def work(pipe: Connection, others: Sequence[Connection], shop: Shop, slots: Slots) -> None:
    """The life of a worker: take an order, carry it out, reply; end when the coordinator is gone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    keep_freed_memory()
    gc.freeze()  # what was inherited is never garbage; leaving it alone keeps its pages shared
    torch.set_num_threads(1)
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, [one])
    except RuntimeError:
        os._exit(CANNOT_TRAIN)
    bench: Bench | None = None
    try:
        while True:
            order = pipe.recv()
            try:
                bench = bench or Bench(shop.workshop)
                reply = _carry_out(order, bench, shop, slots)
            except (Exception, SystemExit) as error:  # whatever a client's code does, the round goes on without it
                reply = Failed(order.index, reason_of(error))
            pipe.send(reply)
    except (EOFError, OSError):
        os._exit(0)


def _carry_out(order: Order, bench: Bench, shop: Shop, slots: Slots) -> Reply:
    if isinstance(order, ScoreOrder):
        test = shop.federation.test
        assert test is not None, "the coordinator asks for scores only where there is a test set"
        return Scored(order.index, bench.score(order.row.tensor(), test[score_chunks(test)[order.index]]))
    if isinstance(order, PersonalOrder):
        row, home = slots.row(order.slot), slots.group(order.slot, "home")
        received = order.row.tensor()
        accuracy = score_client(bench, shop, order.round, order.client, row, received, home, order.first_visit)
        return Fared(order.index, accuracy)
    row, uploads, home = slots.row(order.slot), slots.group(order.slot, "uploads"), slots.group(order.slot, "home")
    for tensor in uploads.values():
        tensor.zero_()
    samples, loss, steps = train_client(
        bench,
        shop,
        order.round,
        order.client,
        row,
        order.row.tensor(),
        {name: place.tensor() for name, place in order.extras},
        home,
        uploads,
        order.first_visit,
    )
    finite = shop.workshop.layout.is_finite(row) and all(map(all_finite, (*uploads.values(), *home.values())))
    return Trained(order.index, samples, loss, steps, finite)
