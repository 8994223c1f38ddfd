"""The methods by name, and how names compose: `fedcross+fedprox` is FedCross's server with FedProx's clients."""

import importlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fedloom.errors import FedloomError, InputError, unknown
from fedloom.methods.base import Companion, Context, Local, Options, Part, Refiner, Server
from fedloom.own_files import run_file
from fedloom.rows import Layout
from fedloom.settings import explain

BUILT_IN = {
    "abavg": "abavg",
    "clusamp": "clusamp",
    "diwa": "diwa",
    "dynafed": "dynafed",
    "fedasam": "fedasam",
    "fedasam-swa": "fedasam",
    "fedavg": "fedavg",
    "fedbabu": "fedbabu",
    "fedbe": "fedbe",
    "fedbn": "fedbn",
    "fedcda": "fedcda",
    "fedcluster": "fedcluster",
    "fedcross": "fedcross",
    "feddf": "feddf",
    "feddyn": "feddyn",
    "fedexp": "fedexp",
    "fedfomo": "fedfomo",
    "fedgen": "fedgen",
    "fedlaw": "fedlaw",
    "fedma": "fedma",
    "fedma-layers": "fedma_layers",
    "fedmix": "fedmix",
    "fedmr": "fedmr",
    "fedmut": "fedmut",
    "fedprox": "fedprox",
    "fedrep": "fedrep",
    "fedsam": "fedsam",
    "gamf": "gamf",
    "indep": "fedmr",
    "lss": "lss",
    "moon": "moon",
    "naivemix": "naivemix",
    "scaffold": "scaffold",
    "soups": "soups",
    "swa": "swa",
    "swad": "swad",
}
"""Our methods, and the file of fedloom.methods that each is in."""
PARTS = ("server", "local", "companion", "refiner")


@dataclass(frozen=True)
class Method:
    """A method: what it is called, what it may be told, and the parts it brings. The rest is FedAvg's."""

    name: str
    summary: str
    reference: str
    options: type[Options] = Options
    server: type[Server[Any]] | None = None
    local: type[Local[Any]] | None = None
    companion: type[Companion[Any]] | None = None
    refiner: type[Refiner[Any]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options of other methods that this one sets unless the user does, such as `fedavg.weighting`."""
    neutral: Mapping[str, Any] | None = None
    """Options with which the method must equal FedAvg bit for bit, where there are such."""
    models_sent: str = ""
    """Models sent in a round with K clients, down and up together, as papers count it."""
    client_keeps: str = "nothing"
    """What each client that has been seen keeps between rounds."""
    server_keeps: str = "1 model"
    """What the server keeps between rounds, of N clients of which K take part in a round."""
    extra_compute: str = "none"
    """What is computed beyond FedAvg's training and mean, and by whom."""
    needs_each: str | None = None
    """What its server does with the answer of each single client, such as "crosses the clients' models"; "" where their
    weighted mean is all it needs. None: not said, which will do for a method that brings a Local alone."""
    server_data: Literal["inputs", "labels"] | None = None
    """What it needs of data on the server: inputs alone, or their labels too; None: no such data."""
    rescales: bool = False
    """Whether its server scales the mean of the clients' models by a factor of its own."""

    @property
    def year(self) -> int | None:
        """The year of its paper, which ends the reference; None where it names none."""
        found = re.search(r"\b(?:19|20)\d\d$", self.reference)
        return int(found[0]) if found else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts it brings."""
        return tuple(part for part in PARTS if getattr(self, part) is not None)

    @property
    def needs_mean_only(self) -> bool:
        """Whether a mean of the answers is all that its part of the server must see. A Local sees one client anyway."""
        return self.needs_each == "" or (self.needs_each is None and self.parts == ("local",))


_methods: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Make a method known by its name. One's own may be registered again (a notebook's cell), ours not replaced."""
    home = f"fedloom.methods.{BUILT_IN.get(method.name)}"
    if method.name in BUILT_IN and all(getattr(method, part).__module__ != home for part in method.parts):
        raise InputError(f"there is already a method {method.name!r}; give yours another name.")
    if not method.name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"a method's name is letters, digits, '-' and '_', not {method.name!r}.")
    _methods[method.name] = method
    return method


def methods() -> dict[str, Method]:
    """All known methods: ours, those of installed packages (entry points `fedloom.methods`), and imported ones."""
    _load_installed()
    return dict(sorted(_methods.items()))


_installed = False
_loading = threading.RLock()


def _load_installed() -> None:
    global _installed
    with _loading:  # several runs may share one process
        if not _installed:
            _installed = True
            _load_all()


def _load_all() -> None:
    for name in sorted(set(BUILT_IN.values())):
        importlib.import_module(f"fedloom.methods.{name}")
    for point in entry_points(group="fedloom.methods"):
        try:
            point.load()
        except FedloomError:
            raise
        except Exception as error:
            raise InputError(f"the installed method {point.value!r} cannot be loaded: {error}.") from error


def import_file(path: str) -> None:
    """Run a user's Python file, which registers its methods; the same file again is not run twice."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {path!r} to import.")
    run_file(file, f"fedloom_imported_{file.stem}")


@dataclass(frozen=True)
class Composition:
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

    def build(self, context: Context) -> "Parts":
        """The parts, ready to run."""
        return Parts(**{part: self._make(part, context) for part in PARTS})

    def build_local(self, context: Context) -> Local[Any]:
        """The clients' part alone, for a site that has no server."""
        local: Local[Any] = self._make("local", context)
        return local

    def _make(self, part: str, context: Context) -> Any:
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
class Parts:
    """The parts of a composed method."""

    server: Server[Any]
    local: Local[Any]
    companion: Companion[Any] | None = None
    refiner: Refiner[Any] | None = None

    def personalised(self, layout: Layout) -> bool:
        """Whether a client uses another model than the deployed one."""
        return personalised(type(self.server), self.local, layout)

    def items(self) -> list[tuple[str, Part[Any]]]:
        """Name and part, of those there are."""
        pairs = [(name, getattr(self, name)) for name in PARTS]
        return [(name, part) for name, part in pairs if part is not None]


def personalised(server: type[Server[Any]], local: Local[Any], layout: Layout) -> bool:
    """Whether a client of these parts uses another model than the deployed one."""
    own = type(local).personal is not Local.personal or server.own_model is not Server.own_model
    return own or bool(local.stays_home(layout))


class Clash(InputError):
    """Methods that exist, and cannot be one."""


def compose(name: str, given: Mapping[str, Mapping[str, Any]] | None = None) -> Composition:
    """The method `name`, such as `fedcross+fedprox`, with the options `given` by method and key."""
    known = methods()
    chosen: list[Method] = []
    for part in name.split("+"):
        if part not in known:
            raise unknown("method", part, known)
        if known[part] in chosen:
            raise Clash(f"{name!r} names {part!r} twice; once is enough.")
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
                raise unknown("method", target, used)
            raise InputError(f"options of {target!r} were given, but the method is {name!r}.")
        values[target].update(pairs)
    bringing = next((method.name for method in chosen if method.server is not None), "fedavg")
    if bringing != "fedavg":
        if "fedavg" in (given or {}):
            raise InputError(f"options of fedavg are those of its server, but in {name!r} the server is {bringing}'s.")
        values["fedavg"] = {}
    return Composition(name, tuple(chosen), {key: _options(used[key], values[key]) for key in used})


def _refuse_clashes(name: str, chosen: list[Method]) -> None:
    for part in PARTS:
        bringing = [method.name for method in chosen if part in method.parts]
        if len(bringing) > 1:
            first, second = bringing[:2]
            raise Clash(f"{name!r} cannot be run: {first} and {second} both bring a {part}, and a run has one {part}.")


def _options(method: Method, values: Mapping[str, Any]) -> Options:
    fields = method.options.model_fields
    for key in values:
        if key not in fields:
            raise (
                unknown(f"option of {method.name}", key, fields)
                if fields
                else InputError(f"{method.name} has no options, so {method.name}.{key} cannot be set.")
            )
    try:
        return method.options(**values)
    except ValidationError as error:
        raise InputError(f"{method.name}.{explain(error)}") from error
