"""Label skew by a Dirichlet draw for each class, and quantity skew by one for the sizes.

A draw that leaves some client with too little is drawn again, but not for ever: at a small alpha it may never succeed.
"""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedloom.data.partitions.request import Indices, Request, Rng, deal, parts_of, whole
from fedloom.errors import InputError

TRIES = 1000
SECONDS = 20.0
OTHERWISE = "fewer clients or a smaller min, or use dirichlet-equal"


@dataclass
class Patience:
    """How often one draws again before giving up; `best` is the smallest client of the best draw."""

    tries: int = 0
    best: int = -1
    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def more(self) -> bool:
        """Whether to draw (again)."""
        self.tries += 1
        return self.tries <= TRIES and (self.tries == 1 or time.monotonic() < self.end)

    def give_up(self, draws: str, clients: str, least: int, of: str, smaller: str) -> InputError:
        return InputError(
            f"none of {self.tries - 1} draws of {draws} gave each of {clients} {least} of the {of} (the smallest "
            f"client had {self.best} at best); ask for a larger alpha, {smaller}."
        )


def by_class(request: Request) -> list[Indices]:
    """Class by class, shares drawn from Dirichlet(alpha): NIID-Bench's procedure, with its balance and its minimum."""
    alpha, least = request.alpha(), request.least(10)
    classes = request.classes()
    request.enough(least)
    patience = Patience()
    shares = _class_shares(alpha, least, np.bincount(classes), request.clients, request.rng, patience)
    if shares is None:
        draws, clients = f"dirichlet:{alpha:g}", f"{request.clients} clients"
        raise patience.give_up(draws, clients, least, f"{len(classes)} samples", OTHERWISE)
    return parts_of(deal(shares, classes, request.rng), request.clients)


def in_blocks(request: Request) -> list[Indices]:
    """The same in blocks of ten clients, then equal slices: Lin et al., 2020, as in their code.

    The samples are cut at random into one part for each block of clients. Within it, classes are shared out until
    every client has half the mean size. The samples, client by client, are then cut anew into slices of equal size:
    a client holds the tail of what its neighbour had too much of.
    """
    alpha, classes = request.alpha(), request.classes()
    block = whole(request.option("block", "10"), "block", 1, "block=10")
    clients, n, rng = request.clients, len(classes), request.rng
    order = rng.permutation(n)
    owner = np.empty(n, dtype=np.int64)
    for first in range(0, clients, block):
        last = min(first + block, clients)
        cut = order[n * first // clients : n * last // clients]
        here = np.unique(classes[cut], return_inverse=True)[1].astype(np.int64)
        least, patience = len(cut) // (2 * (last - first)), Patience()
        shares = _class_shares(alpha, least, np.bincount(here), last - first, rng, patience)
        if shares is None:
            draws, held = f"dirichlet-blocks:{alpha:g}", f"{last - first} clients of a block"
            raise patience.give_up(draws, held, least, f"{len(cut)} samples", "or use dirichlet-equal")
        # Class by class within a client, as the authors' code lists them: a slice's tail is then of few classes.
        lined_up = cut[np.lexsort((here, deal(shares, here, rng)))]
        slices = np.arange(n * first // clients, n * last // clients)
        owner[lined_up] = np.searchsorted(n * np.arange(1, clients + 1) // clients, slices, side="right")
    return parts_of(owner, clients)


def by_size(request: Request) -> list[Indices]:
    """Sizes drawn from Dirichlet(alpha), labels at random: NIID-Bench's quantity skew."""
    alpha, least = request.alpha(), request.least(10)
    request.enough(least)
    clients, n, patience = request.clients, len(request.pool), Patience()
    while patience.more():
        sizes = _cut(_draw(alpha, clients, request.rng), n)
        if sizes.min() >= least:
            owner = np.empty(n, dtype=np.int64)
            owner[request.rng.permutation(n)] = np.repeat(np.arange(clients), sizes)
            return parts_of(owner, clients)
        patience.best = max(patience.best, int(sizes.min()))
    draws, of = f"quantity:{alpha:g}", f"{n} samples"
    raise patience.give_up(draws, f"{clients} clients", least, of, "fewer clients or a smaller min")


def _class_shares(
    alpha: float, least: int, class_sizes: Indices, clients: int, rng: Rng, patience: Patience
) -> Indices | None:
    """How many samples of each class (row) each client (column) gets: drawn until all have `least`."""
    n = int(class_sizes.sum())
    shares = np.zeros((len(class_sizes), clients), dtype=np.int64)
    while patience.more():
        held = np.zeros(clients, dtype=np.int64)
        for label, size in enumerate(class_sizes):
            # Clients that hold their even share get nothing more. Dropping them from a Dirichlet draw and
            # renormalising it is the same as a draw over the others, which cannot end up all zero.
            open_ = np.flatnonzero(held < n / clients)
            shares[label] = 0
            shares[label, open_] = _cut(_draw(alpha, len(open_), rng), int(size))
            held += shares[label]
        if held.min() >= least:
            return shares
        patience.best = max(patience.best, int(held.min()))
    return None


def _cut(draw: NDArray[np.float64], size: int) -> Indices:
    """`size` samples cut at the cumulative shares of a draw."""
    ends = np.cumsum(draw)
    cuts = (ends / ends[-1] * size).astype(np.int64)
    return np.asarray(np.diff(cuts, prepend=0))


def _draw(alpha: float, size: int, rng: Rng) -> NDArray[np.float64]:
    """A Dirichlet draw; at an alpha so extreme that it over- or underflows, the limit it stands for."""
    with np.errstate(all="ignore"):
        draw = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(draw).all() and draw.sum() > 0.5:
        return draw
    return np.ones(size) if alpha > 1 else np.eye(1, size, int(rng.integers(size)))[0]
