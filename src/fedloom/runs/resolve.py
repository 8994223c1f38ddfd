"""Resolve the config of a run and the Python objects of the user."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fedloom.config import Config, make_config, replace_config
from fedloom.data import FederatedDataset
from fedloom.data import splits as on_server
from fedloom.errors import InputError
from fedloom.methods import compose, import_method_file
from fedloom.methods.composition import ComposedMethod, find_composition_option_owners
from fedloom.methods.variants import MethodVariant, parse_method_variant
from fedloom.privacy import compose_privacy_compatible
from fedloom.training.context import Criterion
from fedloom.utils.formatting import short_repr

OWN_PARTITION = "own"
"""The setting `partition` of a user's own `FederatedDataset`."""
PARTITION_BY_SEED = "own by seed"
"""The same, if a function makes the data of each seed."""


@dataclass(frozen=True)
class UserObjects:
    """Python objects that a user passes instead of names."""

    data: FederatedDataset | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None
    loss: Criterion | None = None
    data_by_seed: Mapping[int, FederatedDataset] = field(default_factory=dict)
    """The data of each seed of a comparison, if a function makes them; `data` are those of the first seed."""

    def select_seed(self, seed: int) -> "UserObjects":
        """Return the objects for the run with this seed."""
        return replace(self, data=self.data_by_seed[seed]) if self.data_by_seed else self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("data", "model", "loss") if getattr(self, name) is not None)


@dataclass(frozen=True)
class RunRequest:
    """A run that can be built: its complete config, its method and the Python objects of the user."""

    config: Config
    method: ComposedMethod
    user_objects: UserObjects = field(default_factory=UserObjects)

    def replace_settings(self, **changes: Any) -> "RunRequest":
        """Return the same run with changed settings, on which its method does not depend."""
        return replace(self, config=replace_config(self.config, **changes))

    def replace_seed(self, seed: int) -> "RunRequest":
        """Return the same run with another seed, and the data of that seed."""
        return replace(self.replace_settings(seed=seed), user_objects=self.user_objects.select_seed(seed))


def resolve_run(config: Config, user_objects: UserObjects | None = None) -> RunRequest:
    """Run the imports of a config, compose its method, and complete the config, before anything is written."""
    return complete_request(config, resolve_method(config), user_objects)


def complete_request(
    config: Config, composed_method: ComposedMethod, user_objects: UserObjects | None = None
) -> RunRequest:
    """State all options in a config, pin its partition file and add server data if its method needs them."""
    objects = user_objects or UserObjects()
    _refuse_sites(config, composed_method, objects)
    config = replace_config(config, options=composed_method.resolved_options())
    config = resolve_server_data(record_partition_hash(config), objects, composed_method)
    return RunRequest(config, composed_method, objects)


def _refuse_sites(config: Config, composed_method: ComposedMethod, user_objects: UserObjects) -> None:
    """Raise an InputError if a method that is not federated is to run over sites."""
    data, name = user_objects.data, composed_method.name
    if composed_method.bracket is None or (config.engine != "flower" and (data is None or not data.is_remote)):
        return
    if composed_method.bracket == "centralized":
        raise InputError(f"{name} trains on the samples of all clients in one place, but those of sites stay there.")
    raise InputError(f"{name} sends nothing, so sites have nothing to do together; train at each site alone.")


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
        import_method_file(path)


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
        import_method_file(path)
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


def resolve_server_data(config: Config, user_objects: UserObjects, composed_method: ComposedMethod) -> Config:
    """Add default server data to a config without any, if its method needs them."""
    if config.server_data is not None or not composed_method.use_server_data:
        return config
    brought = user_objects.data is not None and user_objects.data.server_data is not None
    return replace_config(config, server_data=on_server.OWN if brought else on_server.DEFAULT)


def resolve_method_options(options: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Copy options into a new dict. Raise an InputError for `{"mu": 0.1}` without a method."""
    given: Any = options or {}
    if not isinstance(given, Mapping) or not all(isinstance(of_one, Mapping) for of_one in given.values()):
        raise InputError(f'options are given by method, such as {{"fedprox": {{"mu": 0.1}}}}, not {short_repr(given)}.')
    return {method: dict(of_one) for method, of_one in given.items()}


def select_method_options(name: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options that count in the composition `name`, such as `fedcross+fedprox`."""
    return {owner: dict(values) for owner, values in options.items() if owner in find_composition_option_owners(name)}


def describe_user_objects(
    data: object, model: str | nn.Module | Callable[[], nn.Module], loss: Criterion | None
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
        return user_objects, values | {"data": data.name, "partition": OWN_PARTITION, "clients": len(data)}
    return user_objects, values | {"data": data}


def make_data_by_seed(
    data: str | FederatedDataset | Callable[[int], FederatedDataset], seeds: int, first_seed: int
) -> dict[int, FederatedDataset]:
    """Call the function `data` for each seed; return nothing if `data` is not a function.

    All methods of a comparison get the same object for one seed, so that they train on the same clients.
    """
    if isinstance(data, str | FederatedDataset) or not callable(data):
        return {}
    made: dict[int, FederatedDataset] = {}
    for seed in range(first_seed, first_seed + seeds):
        federated_data = data(seed)
        if not isinstance(federated_data, FederatedDataset):
            raise InputError(
                f"data({seed}) is {short_repr(federated_data)}; expected a FederatedDataset, as from "
                "FederatedDataset.from_pool."
            )
        first = made.setdefault(first_seed, federated_data)
        for what in ("name", "classes", "shape"):
            ours, theirs = getattr(federated_data, what), getattr(first, what)
            if ours != theirs:
                raise InputError(f"data({seed}) has {what} {ours!r}, but data({first_seed}) has {what} {theirs!r}.")
        if len(federated_data) != len(first):
            raise InputError(
                f"data({seed}) has {len(federated_data)} clients, but data({first_seed}) has {len(first)}."
            )
        made[seed] = federated_data
    return made


def _name_of(model: nn.Module | Callable[[], nn.Module]) -> str:
    return str(getattr(model, "__name__", type(model).__name__))
