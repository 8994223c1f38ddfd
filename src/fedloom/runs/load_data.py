"""Load the data of a run: those of the clients and those of the server."""

import copy
from dataclasses import dataclass, replace
from functools import partial

from fedloom import data as datasets
from fedloom.config import Config
from fedloom.core.rng import RngStreams
from fedloom.data import Dataset, FederatedDataset, PartitionedDataset
from fedloom.data import splits as on_server
from fedloom.data.cache import Progress
from fedloom.data.splits import ServerDataSplit
from fedloom.errors import InputError
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


def load_run_data(request: RunRequest, rng_streams: RngStreams, progress: Progress | None = None) -> RunData:
    """Load and partition the data that the config names, or take the user's own. `progress` reports downloads."""
    config, data = request.config, request.user_objects.data
    if data is not None:
        run_data = _brought(data, config, rng_streams, progress)
    else:
        run_data = _named(config, rng_streams, progress)
    if config.clients not in (None, len(run_data.federated_data)):
        raise InputError(f"clients is {config.clients}, but the data has {len(run_data.federated_data)} of them.")
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
    if config.normalize != "default":
        federated_data = _change_normalization(federated_data, config.normalize)
    if config.client_test:
        raise InputError(f"client_test needs a data set given by name, but {name!r} is your own.")
    if source is None:
        return RunData(federated_data)
    if source == on_server.OWN or on_server.is_split_spec(source):
        federated_data, server_data = on_server.take_server_split(
            federated_data, source, rng_streams.numpy("server data")
        )
    else:
        server_data = on_server.split_server_data(
            federated_data, source, partial(datasets.load_dataset, progress=progress)
        )
    return RunData(federated_data, server_data=server_data)


def _change_normalization(federated_data: FederatedDataset, spec: str) -> FederatedDataset:
    """Return the same clients with their images normalized in another way."""
    if not isinstance(federated_data, PartitionedDataset):
        raise InputError(
            f"normalize needs a data set given by name or made by from_pool, but {federated_data.name!r} is neither; "
            "set its `transform`."
        )
    pool = Dataset(federated_data.pool, federated_data.pool[:0], (), name=federated_data.name)
    changed = copy.copy(federated_data)
    changed.transform = datasets.with_normalization(pool, spec).transform
    return changed


def _named(config: Config, rng_streams: RngStreams, progress: Progress | None) -> RunData:
    source = config.server_data
    if source == on_server.OWN:
        raise InputError(f"server_data {source!r} needs a FederatedDataset with server data; {config.data!r} has none.")
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
