"""Compose methods by name, such as `fedcross+fedprox`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from fedloom.core.layout import Layout
from fedloom.errors import InputError, unknown_name_error
from fedloom.methods.base import Client, Extras, MethodContext, MethodPart, Options, Refiner, Server
from fedloom.methods.registry import PARTS, Method, methods
from fedloom.methods.variants import parse_method_variant
from fedloom.utils.settings import explain_settings_error


@dataclass(frozen=True)
class ComposedMethod:
    """One or more methods combined into one, with their options."""

    name: str
    methods: tuple[Method, ...]
    options: Mapping[str, Options]

    def owner(self, part: str) -> Method | None:
        """Return the method that provides a part. If none does, FedAvg provides server and client.

        Args:
            part: `server`, `client`, `extras` or `refiner`.

        Returns:
            The method, or None if there are no extras or there is no refiner.
        """
        for method in self.methods:
            if part in method.parts:
                return method
        return methods()["fedavg"] if part in ("server", "client") else None

    @property
    def bracket(self) -> Literal["local", "centralized"] | None:
        """Which bound of federated learning it is, if any (see `Method.bracket`)."""
        return self.methods[0].bracket

    @property
    def use_server_data(self) -> tuple[str, ...]:
        """Names of the methods that need data on the server."""
        return tuple(method.name for method in self.methods if method.server_data)

    @property
    def new_client(self) -> str:
        """Say which model a client gets that never trained."""
        said = [method.new_client for method in self.methods if method.new_client]
        if said:
            return " ".join(said)
        if self.part_class("client").personalize is not Client.personalize:
            return "A new client gets the global model, adapted by the method's personalize()."
        return "A new client gets the global model."

    def part_class(self, part: str) -> type[Any]:
        """Return the class of a part.

        Args:
            part: `server` or `client`.
        """
        kind: type[Any] = getattr(self.owner(part), part)
        return kind

    def build(self, context: MethodContext) -> "MethodParts":
        """Create the parts for one run.

        Args:
            context: What the parts may know about the run.

        Returns:
            The parts.
        """
        return MethodParts(**{part: self._make(part, context) for part in PARTS})

    def build_client(self, context: MethodContext) -> Client[Any]:
        """Create the client part alone, for a site without a server.

        Args:
            context: What the part may know about the run.

        Returns:
            The client part.
        """
        client: Client[Any] = self._make("client", context)
        return client

    def _make(self, part: str, context: MethodContext) -> Any:
        owner = self.owner(part)
        return getattr(owner, part)(context, self.options[owner.name]) if owner else None

    def resolved_options(self) -> dict[str, dict[str, Any]]:
        """Return all options in effect, by method. FedAvg's count only with FedAvg's server."""
        server = self.owner("server")
        return {
            name: options.model_dump(mode="json")
            for name, options in sorted(self.options.items())
            if name != "fedavg" or (server is not None and server.name == "fedavg")
        }


@dataclass(frozen=True)
class MethodParts:
    """The parts of a composed method, created for one run."""

    server: Server[Any]
    client: Client[Any]
    extras: Extras[Any] | None = None
    refiner: Refiner[Any] | None = None

    def notes(self) -> list[str]:
        """Return the notes of all parts."""
        return [note for _, part in self.items() for note in part.notes()]

    def items(self) -> list[tuple[str, MethodPart[Any]]]:
        """Return name and part, for the parts that exist."""
        pairs = [(name, getattr(self, name)) for name in PARTS]
        return [(name, part) for name, part in pairs if part is not None]


def composition_is_personalized(server: type[Server[Any]], client: Client[Any], layout: Layout) -> bool:
    """Return whether clients with these parts use models of their own instead of the global one."""
    own = type(client).personalize is not Client.personalize or server.personal_model is not Server.personal_model
    return own or bool(client.personal_columns(layout))


def find_composition_option_owners(name: str) -> set[str]:
    """Return the methods whose options count in the composition `name`: FedAvg's, only with FedAvg's server."""
    known, named = methods(), set(name.split("+"))
    brings_server = any(known[one].server is not None for one in named - {"fedavg"} if one in known)
    return named - {"fedavg"} if brings_server else named | {"fedavg"}


class IncompatibleMethods(InputError):
    """Raised for methods that exist but cannot be combined."""


def compose(name: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> ComposedMethod:
    """Combine methods by name.

    Args:
        name: A method, or several joined by `+`. Options may stand behind a name: `fedprox:mu=0.1`.
        options: Option values by method and option; all others keep their defaults.

    Returns:
        The composed method; its `build` creates the parts.

    Raises:
        InputError: A method or an option is unknown, or a value is invalid.
        IncompatibleMethods: Two methods provide the same part, or one is named twice.

    Example:
        compose("fedcross+fedprox", {"fedprox": {"mu": 0.1}})
    """
    variant = parse_method_variant(name)
    if variant.settings:
        raise InputError(f"{name!r} sets {next(iter(variant.settings))}, a setting of a run; only options fit here.")
    name, options = variant.name, variant.merge_options(options or {})
    known = methods()
    chosen: list[Method] = []
    for part in name.split("+"):
        if part not in known:
            raise unknown_name_error("method", part, known)
        if known[part] in chosen:
            raise IncompatibleMethods(f"{name!r} names {part!r} twice; once is enough.")
        chosen.append(known[part])
    if len(chosen) > 1:
        chosen = [method for method in chosen if method.name != "fedavg"]  # FedAvg provides missing parts anyway
    _refuse_clashes(name, chosen)

    used = {method.name: method for method in (*chosen, known["fedavg"])}
    values: dict[str, dict[str, Any]] = {method: {} for method in used}
    for method in chosen:
        for key, value in method.defaults.items():
            target, _, option = key.partition(".")
            values.setdefault(target, {})[option] = value
    for target, pairs in options.items():
        if target not in used:
            if target not in known:
                raise unknown_name_error("method", target, used)
            raise InputError(f"options of {target!r} were given, but the method is {name!r}.")
        values[target].update(pairs)
    bringing = next((method.name for method in chosen if method.server is not None), "fedavg")
    if bringing != "fedavg":
        if "fedavg" in options:
            raise InputError(f"options of fedavg are those of its server, but in {name!r} the server is {bringing}'s.")
        values["fedavg"] = {}
    return ComposedMethod(name, tuple(chosen), {key: _options(used[key], values[key]) for key in used})


def _refuse_clashes(name: str, chosen: list[Method]) -> None:
    alone = next((method.name for method in chosen if method.bracket is not None), None)
    if alone is not None and len(chosen) > 1:
        raise IncompatibleMethods(
            f"{name!r} cannot be run: {alone} is not federated, so no part of another method has anything to do."
        )
    for part in PARTS:
        bringing = [method.name for method in chosen if part in method.parts]
        if len(bringing) > 1:
            first, second = bringing[:2]
            raise IncompatibleMethods(
                f"{name!r} cannot be run: {first} and {second} both provide the part {part!r}, and a run has only one."
            )


def _options(method: Method, values: Mapping[str, Any]) -> Options:
    fields = method.options.model_fields
    for key in values:
        if key not in fields:
            raise (
                unknown_name_error(f"option of {method.name}", key, fields)
                if fields
                else InputError(f"{method.name} has no options, so {method.name}.{key} cannot be set.")
            )
    try:
        return method.options(**values)
    except ValidationError as error:
        raise InputError(f"{method.name}.{explain_settings_error(error)}") from error
