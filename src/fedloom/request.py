"""What is asked of a run: a config that names things that exist and leaves nothing open, and what a user brings."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.config import Config, make_config
from fedloom.data import Federation
from fedloom.data import server as on_server
from fedloom.errors import InputError
from fedloom.methods import compose, import_file
from fedloom.methods.catalogue import Composition
from fedloom.privacy import compose_private
from fedloom.workshop import Criterion


@dataclass(frozen=True)
class Own:
    """What a user brings as Python objects instead of names."""

    data: Federation | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None
    loss: Criterion | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("data", "model", "loss") if getattr(self, name) is not None)


def check(config: Config) -> Composition:
    """Find out whether a config names things that exist, before anything is written."""
    for path in config.imports:
        import_file(path)
    return (compose if config.clip_update is None else compose_private)(config.method, config.options)


def pin_partition(config: Config) -> Config:
    """The config with the checksum of the file that its partition is read from, if it is; another file is refused."""
    path = config.partition_file
    if path is None:
        return config
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read the partition {path}: {error.strerror or error}.") from None
    if config.partition_sha256 not in (None, found):
        raise InputError(f"{path} is another partition than the one with the SHA-256 {config.partition_sha256}.")
    return replace_config(config, partition_sha256=found)


def with_server_data(config: Config, own: Own, compositions: Sequence[Composition]) -> Config:
    """The config with data for the server, where one of these methods needs some and nobody has said which."""
    if config.server_data is not None or not any(one.use_server_data for one in compositions):
        return config
    brought = own.data is not None and own.data.server_data is not None
    return replace_config(config, server_data=on_server.OWN if brought else on_server.DEFAULT)


def replace_config(config: Config, **values: Any) -> Config:
    """A config with some values changed, validated again."""
    return make_config({**config.model_dump(), **values})
