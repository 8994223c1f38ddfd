"""The data of a run: what the clients hold, and what the server holds."""

from dataclasses import dataclass, replace
from functools import partial

from fedloom import data as datasets
from fedloom.config import Config
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset
from fedloom.data import splits as on_server
from fedloom.data.cache import Progress
from fedloom.data.splits import ServerDataSplit
from fedloom.errors import InputError
from fedloom.methods.composition import ComposedMethod
from fedloom.runs.resolve import UserObjects


@dataclass(frozen=True)
class _RunData:
    """Everything that a run computes on."""

    federation: FederatedDataset
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a person should know about the data."""
    held: ServerDataSplit | None = None
    """What the server holds."""


def load_run_data(
    config: Config, own: UserObjects, composition: ComposedMethod, streams: RngStreams, progress: Progress | None = None
) -> _RunData:
    """Read and spread the data that the config names, or take the user's own; `progress` follows downloads."""
    if own.data is not None:
        gathered = _brought(own.data, config, streams, progress)
    else:
        gathered = _named(config, streams, progress)
    held = gathered.held
    if held is None:
        return gathered
    _refuse_labels(held, gathered.federation, composition)
    return replace(gathered, notes=(*gathered.notes, held.sentence(composition.use_server_data)))


def _brought(federation: FederatedDataset, config: Config, streams: RngStreams, progress: Progress | None) -> _RunData:
    name, source = federation.name, config.server_data
    if config.partition != "own":
        raise InputError(f"the data {name!r} is spread over its clients already; leave partition out.")
    if config.classes is not None:
        raise InputError(f"classes are picked from a data set known by name, and {name!r} is your own.")
    if config.normalize != "default":
        raise InputError(f"{name!r} is your own and says by `prepare` how it is normalised.")
    if config.client_test:
        raise InputError(f"client_test divides a data set known by name, and {name!r} is your own.")
    if source is None:
        return _RunData(federation)
    if source == on_server.OWN or on_server.is_split_spec(source):
        federation, held = on_server.take_server_split(federation, source, streams.numpy("server data"))
    else:
        held = on_server.load_server_split(federation, source, partial(datasets.load_dataset, progress=progress))
    return _RunData(federation, held=held)


def _named(config: Config, streams: RngStreams, progress: Progress | None) -> _RunData:
    source = config.server_data
    if source == on_server.OWN:
        raise InputError(f"server_data {source!r} is what data of your own bring along; {config.data!r} brings none.")
    dataset = datasets.select_classes(datasets.load_dataset(config.data, progress=progress), config.classes)
    dataset = datasets.with_normalization(dataset, config.normalize)
    if config.client_test:
        dataset = datasets.merge_train_and_test(dataset)
    back = on_server.draw_server_split(source, len(dataset.train), streams.numpy("server data"))
    pooled = datasets.partition_dataset(dataset, config.partition, config.clients, streams.numpy("partition"), back)
    held = None
    if source is not None and len(back):
        held = ServerDataSplit(dataset.train.take(back), source, dataset.classes)
    elif source is not None:
        held = on_server.load_server_split(pooled, source, partial(datasets.load_dataset, progress=progress))
    if config.client_test:
        pooled = datasets.split_client_tests(pooled, config.client_test, streams.numpy("client test"))
    return _RunData(pooled, dataset.class_names, dataset.notes, held)


def _refuse_labels(held: ServerDataSplit, federation: FederatedDataset, composition: ComposedMethod) -> None:
    """Refuse labels of the server's data that are not those of the clients, where a method uses them."""
    users = [method.name for method in composition.methods if method.server_data == "labels"]
    if not users:
        return
    if held.classes != federation.classes:
        raise InputError(
            f"{users[0]} uses the labels of the server's data, but {held.source!r} has {held.classes} classes and "
            f"{federation.name!r} {federation.classes}."
        )
    y = held.samples.y
    if held.classes and (y.min() < 0 or y.max() >= held.classes):
        span = f"labels from {y.min()} to {y.max()}"
        raise InputError(f"the server's data have {span}; expected labels from 0 to {held.classes - 1}.")
