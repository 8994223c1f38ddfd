"""Load the data of a run: those of the clients and those of the server."""

import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fedloom import data as datasets
from fedloom.config import Config, replace_config
from fedloom.core.rng import RngStreams
from fedloom.data import Dataset, FederatedDataset, PartitionedDataset, Samples
from fedloom.data import splits as on_server
from fedloom.data.cache import Progress
from fedloom.data.held_out import (
    HeldOutClients,
    client_positions,
    draw_held_out_clients,
    separate_held_out_clients,
)
from fedloom.data.partitions.base import Indices
from fedloom.data.registry import load_dataset_fitted_without
from fedloom.data.splits import ServerDataSplit
from fedloom.data.transforms import MEASURED
from fedloom.errors import InputError
from fedloom.methods.base import Client
from fedloom.methods.composition import ComposedMethod
from fedloom.runs.resolve import OWN_PARTITION, PARTITION_BY_SEED, RunRequest


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    federated_data: FederatedDataset
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What the user should know about the data."""
    server_data: ServerDataSplit | None = None
    """The data of the server."""
    held_out: HeldOutClients | None = None
    """Clients that never train; `federated_data` does not have them."""

    @property
    def num_clients(self) -> int:
        """Number of all clients, the held-out ones included."""
        return len(self.federated_data) + (len(self.held_out) if self.held_out is not None else 0)


def load_run_data(request: RunRequest, rng_streams: RngStreams, progress: Progress | None = None) -> RunData:
    """Load and partition the data that the config names, or take the user's own. `progress` reports downloads."""
    config, data = request.config, request.user_objects.data
    if data is not None:
        run_data = _brought(data, config, rng_streams, progress)
    else:
        run_data = _named(config, rng_streams, progress)
    if config.clients not in (None, run_data.num_clients):
        raise InputError(f"clients is {config.clients}, but the data has {run_data.num_clients} of them.")
    if run_data.held_out is not None:
        _check_held_out(run_data.held_out, run_data.federated_data, request.method)
    server_data = run_data.server_data
    if server_data is None:
        return run_data
    _refuse_labels(server_data, run_data.federated_data, request.method)
    return replace(run_data, notes=(*run_data.notes, server_data.describe(request.method.use_server_data)))


def _brought(
    federated_data: FederatedDataset, config: Config, rng_streams: RngStreams, progress: Progress | None
) -> RunData:
    name, source = federated_data.name, config.server_data
    if config.partition not in (OWN_PARTITION, PARTITION_BY_SEED):
        raise InputError(f"the data {name!r} is already divided among its clients; leave out partition.")
    if config.classes is not None:
        raise InputError(f"classes needs a data set given by name, but {name!r} is your own.")
    held_out = _draw_held_out(config, federated_data, rng_streams)
    excluded = client_positions(federated_data, held_out)
    if config.normalize != "default":
        federated_data = _change_normalization(federated_data, config.normalize, excluded)
    if config.client_test:
        raise InputError(f"client_test needs a data set given by name, but {name!r} is your own.")
    server_data = None
    if source is not None:
        federated_data, server_data = _take_server_data(federated_data, source, rng_streams, progress, excluded)
    return _separate(RunData(federated_data, server_data=server_data), held_out)


def _take_server_data(
    federated_data: FederatedDataset,
    source: str,
    rng_streams: RngStreams,
    progress: Progress | None,
    excluded: Indices,
) -> tuple[FederatedDataset, ServerDataSplit]:
    """Take the server's data from the clients, without the samples `excluded`, or from where `source` says."""
    if source == on_server.OWN or on_server.is_split_spec(source):
        draws = rng_streams.numpy("server data")
        return on_server.take_server_split(federated_data, source, draws, excluded)
    load = partial(datasets.load_dataset, progress=progress)
    return federated_data, on_server.split_server_data(federated_data, source, load)


def _draw_held_out(config: Config, federated_data: FederatedDataset, rng_streams: RngStreams) -> Indices:
    """Draw the clients that never train; none without the setting."""
    if config.held_out_clients is None:
        return np.arange(0)
    count = replace_config(config, clients=len(federated_data)).num_held_out  # checks that enough clients are left
    return draw_held_out_clients(len(federated_data), count, rng_streams.numpy("held-out clients"))


def _separate(run_data: RunData, held_out: Indices) -> RunData:
    """Move the held-out clients of a run out of its federated data."""
    if not len(held_out):
        return run_data
    federated_data, held_out_clients = separate_held_out_clients(run_data.federated_data, held_out)
    return replace(run_data, federated_data=federated_data, held_out=held_out_clients)


def _check_held_out(
    held_out: HeldOutClients, federated_data: FederatedDataset, composed_method: ComposedMethod
) -> None:
    """Raise an InputError if held-out clients cannot be scored."""
    if not federated_data.classes:
        raise InputError(f"held_out_clients reports accuracies, but {federated_data.name!r} is a regression.")
    owner = composed_method.owner("client")
    adapts = composed_method.part_class("client").personalize is not Client.personalize
    if owner is not None and adapts and not held_out.have_test_samples:
        raise InputError(
            f"{owner.name} adapts the model to a new client's training samples, so held-out clients need other samples "
            "for testing; add client_test, such as 0.2."
        )


def _change_normalization(federated_data: FederatedDataset, spec: str, excluded: Indices) -> FederatedDataset:
    """Return the same clients with their images normalized in another way, not measured on samples `excluded`."""
    if not isinstance(federated_data, PartitionedDataset):
        raise InputError(
            f"normalize needs a data set given by name or made by from_pool, but {federated_data.name!r} is neither; "
            "set its `transform`."
        )
    measured = federated_data.pool
    if len(excluded) and spec == MEASURED:
        measured = measured.take(np.setdiff1d(np.arange(len(measured)), excluded))
    pool = Dataset(measured, measured[:0], (), name=federated_data.name)
    changed = copy.copy(federated_data)
    changed.transform = datasets.with_normalization(pool, spec).transform
    return changed


def _named(config: Config, rng_streams: RngStreams, progress: Progress | None) -> RunData:
    source = config.server_data
    if source == on_server.OWN:
        raise InputError(f"server_data {source!r} needs a FederatedDataset with server data; {config.data!r} has none.")
    if config.held_out_clients is not None:
        return _named_with_held_out(config, rng_streams, progress)
    dataset = datasets.select_classes(datasets.load_dataset(config.data, progress=progress), config.classes)
    dataset = datasets.with_normalization(dataset, config.normalize)
    if config.client_test:
        dataset = datasets.merge_train_and_test(dataset)
    server_indices = on_server.draw_server_split(source, len(dataset.train), rng_streams.numpy("server data"))
    federated_data = datasets.partition_dataset(
        dataset, config.partition, config.clients, rng_streams.numpy("partition"), server_indices
    )
    server_data = None
    if source is not None and len(server_indices):
        server_data = ServerDataSplit(dataset.train.take(server_indices), source, dataset.classes)
    elif source is not None:
        server_data = on_server.split_server_data(
            federated_data, source, partial(datasets.load_dataset, progress=progress)
        )
    if config.client_test:
        federated_data = datasets.split_client_tests(
            federated_data, config.client_test, rng_streams.numpy("client test")
        )
    return RunData(federated_data, dataset.class_names, dataset.notes, server_data)


def _named_with_held_out(config: Config, rng_streams: RngStreams, progress: Progress | None) -> RunData:
    """Load named data. Neither the server nor a statistic of the inputs gets a sample of a held-out client.

    So the partition comes first, and the server's samples are taken from the training clients.
    """
    loaded = datasets.load_dataset(config.data, progress=progress)
    dataset = datasets.select_classes(loaded, config.classes)

    def partition(dataset: Dataset) -> PartitionedDataset:
        whole = datasets.merge_train_and_test(dataset) if config.client_test else dataset
        draws = rng_streams.numpy("partition")
        return datasets.partition_dataset(whole, config.partition, config.clients, draws)

    federated_data: FederatedDataset = partition(dataset)
    held_out = _draw_held_out(config, federated_data, rng_streams)
    excluded = client_positions(federated_data, held_out)
    in_train = excluded[excluded < len(dataset.train)]  # positions from there on are test samples that were merged
    if loaded.fitted:
        numbered = Samples(torch.arange(len(loaded.train))[:, None], loaded.train.y)
        rows = datasets.select_classes(replace(loaded, train=numbered), config.classes).train.x.flatten().numpy()
        unused = np.setdiff1d(np.arange(len(loaded.train)), np.delete(rows, in_train))
        dataset = datasets.select_classes(load_dataset_fitted_without(config.data, unused), config.classes)
    dataset = _normalize_without(dataset, config.normalize, in_train)
    whole = partition(dataset)  # the same clients, with the new inputs
    federated_data, server_data = whole, None
    if config.server_data is not None:
        federated_data, server_data = _take_server_data(whole, config.server_data, rng_streams, progress, excluded)
    if config.client_test:
        assert isinstance(federated_data, PartitionedDataset)
        draws = rng_streams.numpy("client test")
        federated_data = datasets.split_client_tests(federated_data, config.client_test, draws)
    return _separate(RunData(federated_data, dataset.class_names, dataset.notes, server_data), held_out)


def _normalize_without(dataset: Dataset, spec: str, excluded: Indices) -> Dataset:
    """Change the normalization of images. It is not measured on the training samples `excluded`."""
    if spec != MEASURED:
        return datasets.with_normalization(dataset, spec)
    kept = np.setdiff1d(np.arange(len(dataset.train)), excluded)
    measured = replace(dataset, train=dataset.train.take(kept), owners=None, domains=None)
    return replace(dataset, transform=datasets.with_normalization(measured, spec).transform)


def _refuse_labels(
    server_data: ServerDataSplit, federated_data: FederatedDataset, composed_method: ComposedMethod
) -> None:
    """Raise an InputError if a method uses the labels of the server's data and they are not those of the clients."""
    users = [method.name for method in composed_method.methods if method.server_data == "labels"]
    if not users:
        return
    if server_data.classes != federated_data.classes:
        raise InputError(
            f"{users[0]} uses the labels of the server's data, but {server_data.source!r} has {server_data.classes} "
            f"classes and {federated_data.name!r} {federated_data.classes}."
        )
    y = server_data.samples.y
    if server_data.classes and (y.min() < 0 or y.max() >= server_data.classes):
        span = f"labels from {y.min()} to {y.max()}"
        raise InputError(f"the server's data have {span}; expected labels from 0 to {server_data.classes - 1}.")
