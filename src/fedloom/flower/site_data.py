"""Data of real sites: the server's description, the samples at a site.

On the server a federated data set has sizes and no samples. At a site it has only the samples of that site's clients.
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
"""Samples, or arrays `(x, y)` as `FederatedDataset.from_arrays` takes them."""


@dataclass(frozen=True)
class SiteDataSpec:
    """Description of the sites' data for the server, which never sees the data."""

    classes: int
    """Number of classes; 0 if the task is not a classification."""
    shape: tuple[int, ...]
    """Shape of one prepared input, such as (1, 28, 28)."""
    name: str = "sites"
    """Name of the data in reports."""
    vocabulary_size: int = 0
    """Number of different tokens, if inputs are tokens."""
    transform: InputTransform | None = None
    """Normalization of images, the same at all sites. The default scales images to 0..1 and changes nothing else."""
    test: Given | None = None
    """The server's own test set, if it has one."""
    server_data: Given | None = None
    """Samples at the server, for methods that need them there."""


@dataclass(frozen=True)
class SiteData:
    """The samples of one site: training samples, and its own test samples if it has any."""

    train: Given
    test: Given | None = None


class SiteDataServerView(FederatedDataset):
    """The clients as the server sees them: only the number of samples of each."""

    is_remote = True

    def __init__(self, federated_data: FederatedDataset, num_clients: int, num_examples: Callable[[int], int]) -> None:
        self._num_clients, self._num_examples = num_clients, num_examples
        _copy_description(federated_data, self)

    def __len__(self) -> int:
        return self._num_clients

    def num_examples(self, client_id: int) -> int:
        return self._num_examples(client_id)

    def client_samples(self, client_id: int) -> Samples:
        raise FedloomError(f"the samples of client {client_id} are at its site, not here.")


class _SiteDataset(FederatedDataset):
    """The clients of one site with their samples, without the clients of other sites."""

    def __init__(self, num_clients: int, samples_by_client: Mapping[int, Samples]) -> None:
        self._num_clients, self._samples_by_client = num_clients, dict(samples_by_client)

    def __len__(self) -> int:
        return self._num_clients

    @property
    def available_client_ids(self) -> Sequence[int]:
        return sorted(self._samples_by_client)

    def client_samples(self, client_id: int) -> Samples:
        if client_id not in self._samples_by_client:
            raise FedloomError(
                f"client {client_id} is not here; this site has {', '.join(map(str, sorted(self._samples_by_client)))}."
            )
        return self._samples_by_client[client_id]


def _copy_description(source: FederatedDataset, target: FederatedDataset) -> None:
    """Copy everything but the samples of the clients."""
    for name in ("name", "classes", "shape", "vocabulary_size", "transform", "test", "server_data"):
        setattr(target, name, getattr(source, name))


def restrict_site_data(federated_data: FederatedDataset, client_ids: Sequence[int]) -> _SiteDataset:
    """Return one site's part of a data set that every site can read as a whole, for tests."""
    for client_id in client_ids:
        if not 0 <= client_id < len(federated_data):
            raise InputError(
                f"there is no client {client_id}: the run has {len(federated_data)} clients, numbered from 0."
            )
    samples_by_client = {client_id: federated_data.client_samples(client_id) for client_id in client_ids}
    made = _SiteDataset(len(federated_data), samples_by_client)
    _copy_description(federated_data, made)
    owners = federated_data.test_owners
    if made.test is not None and owners is not None:
        mine = np.flatnonzero(np.isin(owners, list(client_ids)))
        made.test, made.test_owners = made.test.take(mine), owners[mine]
    return made


def make_empty_site_dataset(spec: SiteDataSpec) -> FederatedDataset:
    """Return a data set without clients that has the properties in `spec`."""
    test = _check_site_samples(spec.test, "the server's test set")
    server_data = _check_site_samples(spec.server_data, "the server's data")
    like = test if test is not None else server_data
    made = _SiteDataset(0, {})
    made.name, made.classes, made.shape = spec.name, spec.classes, tuple(spec.shape)
    made.vocabulary_size = spec.vocabulary_size
    made.transform = spec.transform or (like.default_transform() if like is not None else InputTransform.identity())
    made.test, made.server_data = test, server_data
    return made


def make_site_dataset(spec: SiteDataSpec, num_clients: int, client_id: int, site_data: SiteData) -> _SiteDataset:
    """Return the data set of a site with its own data."""
    train = _check_site_samples(site_data.train, f"client {client_id}")
    test = _check_site_samples(site_data.test, f"the test set of client {client_id}")
    assert train is not None
    if len(train) and train.shape != tuple(spec.shape):
        raise InputError(f"client {client_id} has inputs of shape {train.shape}; the task says {tuple(spec.shape)}.")
    if spec.classes and len(train) and not 0 <= int(train.y.min()) <= int(train.y.max()) < spec.classes:
        span = f"labels from {int(train.y.min())} to {int(train.y.max())}"
        raise InputError(f"client {client_id} has {span}; the task says labels from 0 to {spec.classes - 1}.")
    made = _SiteDataset(num_clients, {client_id: train})
    _copy_description(make_empty_site_dataset(spec), made)  # with the server's data, which sites do not use
    made.transform = spec.transform or train.default_transform()
    made.test, made.test_owners = test, None if test is None else np.full(len(test), client_id)
    return made


def _check_site_samples(given: Given | None, owner: str) -> Samples | None:
    """Return checked samples; `owner` names them in errors."""
    if given is None or isinstance(given, Samples):
        return given
    x, y = given
    try:
        return FederatedDataset.from_arrays([(x, y)], name=owner).client_samples(0)
    except InputError as error:
        raise InputError(str(error).replace("client 0", owner)) from None


def site_data_clients(node_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the clients in a node configuration: `client=3`, `clients="0,5,10"` or a simulation's `partition-id`."""
    given = node_config.get("clients", node_config.get("client", node_config.get("partition-id")))
    if given is None:
        return ()
    words = str(given).replace(" ", ",").split(",")
    if not all(re.fullmatch(r"\d+", word) for word in words):
        raise InputError(
            f"the client of a node must be a number from 0, or several separated by commas, not {given!r}."
        )
    return tuple(sorted({int(word) for word in words}))


SITE_DATA = "site_data.py"


def import_site_data_file(app_folder: Path) -> ModuleType | None:
    """Run the app's `site_data.py` and return the module, or None if there is no such file."""
    path = app_folder / SITE_DATA
    if not path.is_file():
        return None
    return run_user_file(path, f"fedloom_site_data_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}")


def read_site_data_spec(site_module: ModuleType | None) -> SiteDataSpec | None:
    """Return TASK of the sites' file; None stands for the data set in the settings."""
    spec = getattr(site_module, "TASK", None)
    if spec is not None and not isinstance(spec, SiteDataSpec):
        raise InputError(f"TASK in {SITE_DATA} must be a fedloom.flower.site_data.SiteDataSpec or None, not {spec!r}.")
    return spec


def load_client_site_data(site_module: ModuleType | None, node_config: Mapping[str, Any], client_id: int) -> SiteData:
    """Return what `load` in the sites' file returns for this client."""
    load = getattr(site_module, "load", None)
    if not callable(load):
        raise InputError(f"{SITE_DATA} must have a function `load(node, client)`.")
    try:
        site_data = load(dict(node_config), client_id)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"load in {SITE_DATA} failed: {type(error).__name__}: {error}.") from error
    if isinstance(site_data, tuple) and len(site_data) == 2:
        site_data = SiteData(site_data)
    if not isinstance(site_data, SiteData):
        raise InputError(f"load in {SITE_DATA} must return (x, y) or a SiteData, not {type(site_data).__name__}.")
    return site_data
