"""`fedcross+fedprox`: ComposedMethod, compose, conflicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fedloom.core.layout import Layout
from fedloom.errors import InputError, unknown_name_error
from fedloom.methods.base import Client, Extras, MethodContext, MethodPart, Options, Refiner, Server
from fedloom.methods.registry import PARTS, Method, methods
from fedloom.utils.settings import explain_settings_error


@dataclass(frozen=True)
class ComposedMethod:
    """Several methods as one: which method brings each part, and the options of all of them."""

    name: str
    methods: tuple[Method, ...]
    options: Mapping[str, Options]

    def owner(self, part: str) -> Method | None:
        """The method that brings `part`; FedAvg for the parts every run has."""
        for method in self.methods:
            if part in method.parts:
                return method
        return methods()["fedavg"] if part in ("server", "local") else None

    @property
    def use_server_data(self) -> tuple[str, ...]:
        """The methods that need data on the server."""
        return tuple(method.name for method in self.methods if method.server_data)

    def part_class(self, part: str) -> type[Any]:
        """The class of a part that every run has, `server` or `local`."""
        kind: type[Any] = getattr(self.owner(part), part)
        return kind

    def build(self, context: MethodContext) -> "MethodParts":
        """The parts, ready to run."""
        return MethodParts(**{part: self._make(part, context) for part in PARTS})

    def build_local(self, context: MethodContext) -> Client[Any]:
        """The clients' part alone, for a site that has no server."""
        local: Client[Any] = self._make("local", context)
        return local

    def _make(self, part: str, context: MethodContext) -> Any:
        owner = self.owner(part)
        return getattr(owner, part)(context, self.options[owner.name]) if owner else None

    def stated(self) -> dict[str, dict[str, Any]]:
        """Every option in force, by method. FedAvg's are its server's."""
        server = self.owner("server")
        return {
            name: options.model_dump(mode="json")
            for name, options in sorted(self.options.items())
            if name != "fedavg" or (server is not None and server.name == "fedavg")
        }


@dataclass(frozen=True)
class MethodParts:
    """The parts of a composed method."""

    server: Server[Any]
    local: Client[Any]
    companion: Extras[Any] | None = None
    refiner: Refiner[Any] | None = None

    def personalised(self, layout: Layout) -> bool:
        """Whether a client uses another model than the deployed one."""
        return is_personalized(type(self.server), self.local, layout)

    def items(self) -> list[tuple[str, MethodPart[Any]]]:
        """Name and part, of those there are."""
        pairs = [(name, getattr(self, name)) for name in PARTS]
        return [(name, part) for name, part in pairs if part is not None]


def is_personalized(server: type[Server[Any]], local: Client[Any], layout: Layout) -> bool:
    """Whether a client of these parts uses another model than the deployed one."""
    own = type(local).personal is not Client.personal or server.own_model is not Server.own_model
    return own or bool(local.stays_home(layout))


class IncompatibleMethods(InputError):
    """Methods that exist, and cannot be one."""


def compose(name: str, given: Mapping[str, Mapping[str, Any]] | None = None) -> ComposedMethod:
    """The method `name`, such as `fedcross+fedprox`, with the options `given` by method and key."""
    known = methods()
    chosen: list[Method] = []
    for part in name.split("+"):
        if part not in known:
            raise unknown_name_error("method", part, known)
        if known[part] in chosen:
            raise IncompatibleMethods(f"{name!r} names {part!r} twice; once is enough.")
        chosen.append(known[part])
    if len(chosen) > 1:
        chosen = [method for method in chosen if method.name != "fedavg"]  # its parts are what is left anyway
    _refuse_clashes(name, chosen)

    used = {method.name: method for method in (*chosen, known["fedavg"])}
    values: dict[str, dict[str, Any]] = {method: {} for method in used}
    for method in chosen:
        for key, value in method.defaults.items():
            target, _, option = key.partition(".")
            values.setdefault(target, {})[option] = value
    for target, pairs in (given or {}).items():
        if target not in used:
            if target not in known:
                raise unknown_name_error("method", target, used)
            raise InputError(f"options of {target!r} were given, but the method is {name!r}.")
        values[target].update(pairs)
    bringing = next((method.name for method in chosen if method.server is not None), "fedavg")
    if bringing != "fedavg":
        if "fedavg" in (given or {}):
            raise InputError(f"options of fedavg are those of its server, but in {name!r} the server is {bringing}'s.")
        values["fedavg"] = {}
    return ComposedMethod(name, tuple(chosen), {key: _options(used[key], values[key]) for key in used})


def _refuse_clashes(name: str, chosen: list[Method]) -> None:
    for part in PARTS:
        bringing = [method.name for method in chosen if part in method.parts]
        if len(bringing) > 1:
            first, second = bringing[:2]
            raise IncompatibleMethods(
                f"{name!r} cannot be run: {first} and {second} both bring a {part}, and a run has one {part}."
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
