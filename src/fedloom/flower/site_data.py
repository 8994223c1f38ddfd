"""The data of real sites: what the server may know, and what a site holds.

On the server a federation has sizes and no samples. On a site it has the samples of that site's clients alone.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedloom.data import FederatedDataset, InputTransform, Samples
from fedloom.data.samples import Array
from fedloom.errors import FedloomError, InputError
from fedloom.utils.system import run_user_file

Given = Samples | tuple[Array, Array]
"""Samples, or arrays `(x, y)` as `Federation.from_arrays` takes them."""


@dataclass(frozen=True)
class SiteDataSpec:
    """What the server must know of data that it never sees."""

    classes: int
    """How many labels there are; 0 where the task is not a classification."""
    shape: tuple[int, ...]
    """The shape of one prepared input, such as (1, 28, 28)."""
    name: str = "sites"
    """What reports call the data."""
    tokens: int = 0
    """Where inputs are tokens: how many different ones there may be."""
    prepare: InputTransform | None = None
    """How images are normalised, the same at all sites; by default they are scaled to 0..1 and all else is left."""
    test: Given | None = None
    """The server's own test set, if it has one."""
    server_data: Given | None = None
    """What the server holds for methods that need data there."""


@dataclass(frozen=True)
class SiteData:
    """What one site brings: samples to train on, and its own test samples if it has some."""

    train: Given
    test: Given | None = None


class SiteDataServerView(FederatedDataset):
    """The clients as the server knows them: how many samples each has, and nothing more."""

    blind = True

    def __init__(self, like: FederatedDataset, clients: int, count: Callable[[int], int]) -> None:
        self._clients, self._count = clients, count
        self.name, self.classes, self.shape, self.tokens = like.name, like.classes, like.shape, like.tokens
        self.prepare, self.test, self.server_data = like.prepare, like.test, like.server_data

    def __len__(self) -> int:
        return self._clients

    def samples(self, k: int) -> int:
        return self._count(k)

    def client(self, k: int) -> Samples:
        raise FedloomError(f"the samples of client {k} are at its site, not here.")


class _SiteDataset(FederatedDataset):
    """The clients of one site, with their samples; of the others it knows nothing."""

    def __init__(
        self,
        like: FederatedDataset,
        clients: int,
        held: Mapping[int, Samples],
        test: Samples | None,
        test_owners: Any = None,
    ) -> None:
        self._clients, self._held = clients, dict(held)
        self.name, self.classes, self.shape, self.tokens = like.name, like.classes, like.shape, like.tokens
        self.prepare, self.test, self.test_owners = like.prepare, test, test_owners

    def __len__(self) -> int:
        return self._clients

    @property
    def here(self) -> Sequence[int]:
        return sorted(self._held)

    def samples(self, k: int) -> int:
        return len(self.client(k))

    def client(self, k: int) -> Samples:
        if k not in self._held:
            raise FedloomError(f"client {k} is not at this site; {', '.join(map(str, sorted(self._held)))} is.")
        return self._held[k]


def restrict_site_data(whole: FederatedDataset, clients: Sequence[int]) -> _SiteDataset:
    """A federation for trying out, where every site can read the whole data set, seen from one of its sites."""
    for client in clients:
        if not 0 <= client < len(whole):
            raise InputError(f"there is no client {client}: the run has {len(whole)} clients, from 0 on.")
    held = {client: whole.client(client) for client in clients}
    test, owners = whole.test, whole.test_owners
    if test is not None and owners is not None:
        mine = np.flatnonzero(np.isin(owners, list(clients)))
        test, owners = test.take(mine), owners[mine]
    return _SiteDataset(whole, len(whole), held, test, owners)


def make_empty_site_dataset(task: SiteDataSpec) -> FederatedDataset:
    """A federation without clients that says what `task` says."""
    test, held = (
        _check_site_samples(task.test, "the server's test set"),
        _check_site_samples(task.server_data, "the server's data"),
    )
    like = test if test is not None else held
    made = _Described()
    made.name, made.classes, made.shape, made.tokens = task.name, task.classes, tuple(task.shape), task.tokens
    made.prepare = task.prepare or (like.default_prepare() if like is not None else InputTransform.identity())
    made.test, made.server_data = test, held
    return made


def make_site_dataset(task: SiteDataSpec, clients: int, client: int, brought: SiteData) -> _SiteDataset:
    """The federation of a site with data of its own."""
    train = _check_site_samples(brought.train, f"client {client}")
    test = _check_site_samples(brought.test, f"the test set of client {client}")
    assert train is not None
    if len(train) and train.shape != tuple(task.shape):
        raise InputError(f"client {client} has inputs of shape {train.shape}; the task says {tuple(task.shape)}.")
    if task.classes and len(train) and not 0 <= int(train.y.min()) <= int(train.y.max()) < task.classes:
        span = f"labels from {int(train.y.min())} to {int(train.y.max())}"
        raise InputError(f"client {client} has {span}; the task says labels from 0 to {task.classes - 1}.")
    like = make_empty_site_dataset(task)
    if task.prepare is None:
        like.prepare = train.default_prepare()
    owners = None if test is None else np.full(len(test), client)
    made = _SiteDataset(like, clients, {client: train}, test, owners)
    made.server_data = like.server_data  # it is in the app, which is the same everywhere; nobody uses it here
    return made


def _check_site_samples(given: Given | None, who: str) -> Samples | None:
    """Samples from what a person brings, checked."""
    if given is None or isinstance(given, Samples):
        return given
    x, y = given
    try:
        return FederatedDataset.from_arrays([(x, y)], name=who).client(0)
    except InputError as error:
        raise InputError(str(error).replace("client 0", who)) from None


class _Described(FederatedDataset):
    def __len__(self) -> int:
        return 0

    def client(self, k: int) -> Samples:
        raise FedloomError("there are no clients here.")


def site_data_clients(node: Mapping[str, Any]) -> tuple[int, ...]:
    """The clients that a node's configuration names: `client=3`, `clients="0,5,10"` or a simulation's partition."""
    given = node.get("clients", node.get("client", node.get("partition-id")))
    if given is None:
        return ()
    words = str(given).replace(" ", ",").split(",")
    if not all(re.fullmatch(r"\d+", word) for word in words):
        raise InputError(f"the client of a node is a number from 0 on, or some joined by commas, not {given!r}.")
    return tuple(sorted({int(word) for word in words}))


SITE_DATA = "site_data.py"


def import_site_data_file(folder: Path) -> ModuleType | None:
    """The sites' own file, run; None where the app has none."""
    path = folder / SITE_DATA
    if not path.is_file():
        return None
    return run_user_file(path, f"fedloom_site_data_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}")


def read_site_data_spec(module: ModuleType | None) -> SiteDataSpec | None:
    """What the sites' file says of data that the server never sees; None: the data set that the settings name."""
    task = getattr(module, "TASK", None)
    if task is not None and not isinstance(task, SiteDataSpec):
        raise InputError(f"TASK in {SITE_DATA} must be a fedloom.flower.site_data.SiteDataSpec or None, not {task!r}.")
    return task


def load_client_site_data(module: ModuleType | None, node: Mapping[str, Any], client: int) -> SiteData:
    """What a site's file loads."""
    load = getattr(module, "load", None)
    if not callable(load):
        raise InputError(f"{SITE_DATA} must have a function `load(node, client)`.")
    try:
        brought = load(dict(node), client)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"load in {SITE_DATA} failed: {type(error).__name__}: {error}.") from error
    if isinstance(brought, tuple) and len(brought) == 2:
        brought = SiteData(brought)
    if not isinstance(brought, SiteData):
        raise InputError(f"load in {SITE_DATA} must return (x, y) or a SiteData, not {type(brought).__name__}.")
    return brought
