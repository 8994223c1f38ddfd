"""Resolve the config of a run and the Python objects of the user."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.config import Config, make_config, replace_config
from fedloom.data import FederatedDataset
from fedloom.data import splits as on_server
from fedloom.errors import InputError
from fedloom.methods import compose, import_file
from fedloom.methods.composition import ComposedMethod
from fedloom.methods.variants import MethodVariant, parse_method_variant
from fedloom.privacy import compose_privacy_compatible
from fedloom.training.context import Criterion
from fedloom.utils.formatting import short_repr


@dataclass(frozen=True)
class UserObjects:
    """Python objects that a user passes instead of names."""

    data: FederatedDataset | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None
    loss: Criterion | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("data", "model", "loss") if getattr(self, name) is not None)


def resolve_config(values: Mapping[str, Any], user_objects: UserObjects | None = None) -> Config:
    """Return the config of a run whose `method` may be a variant, such as `fedprox:mu=0.1,lr=0.05`."""
    method = values.get("method")
    if not isinstance(method, str):
        return make_config(values)
    if ":" in method:
        import_method_files(values)
    return make_variant_config(values, parse_method_variant(method), user_objects or UserObjects())


def import_method_files(values: Mapping[str, Any]) -> None:
    """Run the files in the setting `imports`, whose methods a variant may name."""
    for path in make_config({"imports": values.get("imports", [])}).imports:
        import_file(path)


def make_variant_config(values: Mapping[str, Any], variant: MethodVariant, user_objects: UserObjects) -> Config:
    """Return the config of a variant. Its options and settings take the place of those in `values`."""
    if values.get("variant") is not None:
        raise InputError("variant cannot be set; write options and settings behind the method, as in fedprox:mu=0.1.")
    if "model" in variant.settings and user_objects.model is not None:
        raise InputError(f"{variant.label!r} sets model, but the model is a Python object.")
    options = variant.merge_options(resolve_method_options(values.get("options")))
    label = variant.label if variant.label != variant.name else None
    return make_config({**variant.merge_settings(values), "method": variant.name, "options": options, "variant": label})


def resolve_method(config: Config) -> ComposedMethod:
    """Compose the method of a config. Raise an InputError for unknown names, before anything is written."""
    for path in config.imports:
        import_file(path)
    return (compose if config.clip_update is None else compose_privacy_compatible)(config.method, config.options)


def record_partition_hash(config: Config) -> Config:
    """Add the SHA-256 of the partition file, if any, to a config. Raise an InputError if the file has changed."""
    path = config.partition_file
    if path is None:
        return config
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read the partition {path}: {error.strerror or error}.") from None
    if config.partition_sha256 not in (None, found):
        raise InputError(f"{path} is not the expected partition: its SHA-256 is not {config.partition_sha256}.")
    return replace_config(config, partition_sha256=found)


def resolve_server_data(
    config: Config, user_objects: UserObjects, composed_methods: Sequence[ComposedMethod]
) -> Config:
    """Add default server data to a config without any, if one of these methods needs them."""
    if config.server_data is not None or not any(one.use_server_data for one in composed_methods):
        return config
    brought = user_objects.data is not None and user_objects.data.server_data is not None
    return replace_config(config, server_data=on_server.OWN if brought else on_server.DEFAULT)


def resolve_method_options(options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Copy options into a new dict. Raise an InputError for `{"mu": 0.1}` without a method."""
    given: Any = options or {}
    if not isinstance(given, Mapping) or not all(isinstance(of_one, Mapping) for of_one in given.values()):
        raise InputError(f'options are given by method, such as {{"fedprox": {{"mu": 0.1}}}}, not {short_repr(given)}.')
    return {method: dict(of_one) for method, of_one in given.items()}


def select_method_options(
    composed_method: ComposedMethod, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the options of the methods that are part of `composed_method`."""
    return {name: dict(values) for name, values in options.items() if name in composed_method.resolved_options()}


def describe_user_objects(
    data: str | FederatedDataset, model: str | nn.Module | Callable[[], nn.Module], loss: Criterion | None
) -> tuple[UserObjects, dict[str, Any]]:
    """Return the user's Python objects, and the settings that follow from them."""
    if not isinstance(data, str | FederatedDataset):
        raise InputError(
            "data must be the name of a data set or a FederatedDataset (see FederatedDataset.from_arrays), not "
            f"{short_repr(data)}."
        )
    if not isinstance(model, str) and not callable(model):
        raise InputError(
            f"the model must be a name, an nn.Module or a function that returns one, not {type(model).__name__}."
        )
    if loss is not None and not callable(loss):
        raise InputError(f"the loss must be a function of outputs and targets, not {short_repr(loss)}.")
    user_objects = UserObjects(
        data if isinstance(data, FederatedDataset) else None,
        None if isinstance(model, str) else model,
        loss,
    )
    values: dict[str, Any] = {"model": model if isinstance(model, str) else _name_of(model)}
    if isinstance(data, FederatedDataset):
        return user_objects, values | {"data": data.name, "partition": "own", "clients": len(data)}
    return user_objects, values | {"data": data}


def _name_of(model: nn.Module | Callable[[], nn.Module]) -> str:
    return str(getattr(model, "__name__", type(model).__name__))
