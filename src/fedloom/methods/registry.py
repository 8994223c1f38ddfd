"""Registry of methods: built in, of installed packages, of a user's file."""

import importlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

from fedloom.errors import FedloomError, InputError
from fedloom.methods.base import Client, Extras, MethodPart, Options, Refiner, Server
from fedloom.utils.system import run_user_file

BUILT_IN = {
    "abavg": "abavg",
    "centralized": "centralized",
    "clusamp": "clusamp",
    "diwa": "diwa",
    "dynafed": "dynafed",
    "fedadagrad": "fedopt",
    "fedadam": "fedopt",
    "fedasam": "fedasam",
    "fedasam-swa": "fedasam",
    "fedavg": "fedavg",
    "fedavgm": "fedopt",
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
    "fednova": "fednova",
    "fedprox": "fedprox",
    "fedrep": "fedrep",
    "fedsam": "fedsam",
    "fedyogi": "fedopt",
    "gamf": "gamf",
    "indep": "indep",
    "local": "local",
    "lss": "lss",
    "moon": "moon",
    "naivemix": "fedmix",
    "scaffold": "scaffold",
    "soups": "soups",
    "swa": "swa",
    "swad": "swad",
}
"""Built-in methods, and the module of `fedloom.methods` that each one is in."""
PARTS = ("server", "client", "extras", "refiner")


@dataclass(frozen=True)
class Method:
    """A method: its name, its options and the parts that it provides. FedAvg provides the others."""

    name: str
    """What users type: letters, digits, `-` and `_`."""
    summary: str
    """One line for `fedloom list methods`."""
    reference: str
    """The paper or file. The year comes last."""
    options: type[Options] = Options
    server: type[Server[Any]] | None = None
    client: type[Client[Any]] | None = None
    extras: type[Extras[Any]] | None = None
    refiner: type[Refiner[Any]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other methods' options that it changes, such as `fedavg.weighting`."""
    neutral: Mapping[str, Any] | None = None
    """Options with which the method equals FedAvg bit for bit, if there are any."""
    models_sent: str = ""
    """Models sent in a round with K clients, such as "2K - heads"; empty if a count tells it."""
    server_state: str = ""
    """What the server keeps between rounds, with N clients of which K train in a round; empty if a count tells it."""
    extra_compute: str = "none"
    """What is computed beyond FedAvg's training and mean, and by whom."""
    server_data: Literal["inputs", "labels"] | None = None
    """Which data it needs on the server: inputs, or inputs and labels; None: no data."""
    rescales: bool = False
    """Whether the server scales the mean of the client models by a factor of its own."""
    bracket: Literal["local", "centralized"] | None = None
    """Whether it is no federated learning but a bound of it: every client for itself (local), or all training samples
    in one place (centralized). It then cannot be combined with other methods, and runs without privacy."""
    new_client: str = ""
    """A sentence that says which model a client gets that never trained; empty: it gets the global model."""

    @property
    def year(self) -> int | None:
        """Year of the paper, from the end of the reference; None if there is none."""
        found = re.search(r"\b(?:19|20)\d\d$", self.reference)
        return int(found[0]) if found else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the method provides."""
        return tuple(part for part in PARTS if getattr(self, part) is not None)

    @property
    def part_that_needs_updates(self) -> type[MethodPart[Any]] | None:
        """The part that needs single updates; None if their mean is enough."""
        classes = [getattr(self, part) for part in self.parts]
        return next((part for part in classes if part.needs == "updates"), None)


_methods: dict[str, Method] = {}


class _MethodFields(TypedDict, total=False):
    """What `register` may be told of a class; see the fields of `Method`."""

    reference: str
    defaults: Mapping[str, Any]
    neutral: Mapping[str, Any] | None
    models_sent: str
    server_state: str
    extra_compute: str
    server_data: Literal["inputs", "labels"] | None
    rescales: bool
    new_client: str


P = TypeVar("P", bound=type[MethodPart[Any]])


@overload
def register(method: Method, /) -> Method: ...


@overload
def register(name: str, /, **fields: Unpack[_MethodFields]) -> Callable[[P], P]: ...


def register(method: Method | str, /, **fields: Unpack[_MethodFields]) -> Method | Callable[[P], P]:
    """Register a method under its name.

    Write it above a class with the name, or call it with a `Method` that has several parts. The class is the method's
    server, client, extras or refiner. Its generic argument is the class of its options, and the first line of its
    docstring is the summary. You may register your own method again, for example in a notebook. You cannot replace a
    built-in one.

    Args:
        method: The name, or a whole `Method`.
        **fields: More fields of `Method`, such as `reference`, `neutral` and `defaults`.

    Returns:
        A decorator, or the same `Method`.

    Raises:
        InputError: The name is that of a built-in method, or has other characters than letters, digits, `-` and `_`.
            Or the class is not a part, is not complete, or has no docstring.

    Example:
        @register("my-noise", reference="Doe, 2025", neutral={"scale": 0.0})
        class NoiseClient(Client[NoiseOptions]):
            \"\"\"Add noise to gradients.\"\"\"
    """
    if isinstance(method, Method):
        _store_method(method)
        return method
    if not isinstance(method, str):
        raise InputError('register needs the name of the method: write @register("my-method") above the class.')
    name: str = method

    def decorate(part: P) -> P:
        _store_method(_describe_part(name, part, fields))
        return part

    return decorate


def _store_method(method: Method) -> None:
    module = f"fedloom.methods.{BUILT_IN.get(method.name)}"
    if method.name in BUILT_IN and all(getattr(method, part).__module__ != module for part in method.parts):
        raise InputError(f"there is already a method {method.name!r}; give yours another name.")
    if not method.name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"a method's name is letters, digits, '-' and '_', not {method.name!r}.")
    _methods[method.name] = method


def _describe_part(name: str, part: type[MethodPart[Any]], fields: _MethodFields) -> Method:
    """Return the method that consists of this part alone."""
    title = getattr(part, "__name__", repr(part))
    kinds = {"server": Server, "client": Client, "extras": Extras, "refiner": Refiner}
    kind = next((kind for kind, base in kinds.items() if isinstance(part, type) and issubclass(part, base)), None)
    if kind is None:
        raise InputError(f"{title} cannot be the method {name!r}: derive it from Server, Client, Extras or Refiner.")
    if missing := sorted(getattr(part, "__abstractmethods__", ())):
        raise InputError(f"{title} cannot be the method {name!r}: it does not define {', '.join(missing)}.")
    summary = (part.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    if not summary:
        raise InputError(f"{title} needs a docstring: its first line is the summary of the method {name!r}.")
    before = _methods.get(name)
    others = [getattr(before, each) for each in before.parts if each != kind] if before is not None else []
    if any(other.__module__ == part.__module__ for other in others):
        raise InputError(
            f"{name!r} is already the method of {others[0].__name__}. Give {title} another name, or register both "
            "parts as one Method(...)."
        )
    known: dict[str, Any] = {kind: part, "options": _find_options(part), "reference": "", **fields}
    return Method(name, summary, **known)


def _find_options(part: type[MethodPart[Any]]) -> type[Options]:
    """Return the class of a part's options: the generic argument of the nearest class that has one."""
    for cls in part.__mro__:
        stated = [inspect.get_annotations(cls).get("options")]
        for base in vars(cls).get("__orig_bases__", ()):
            stated += [getattr(each, "__bound__", None) or each for each in get_args(base)]
        for each in stated:
            if isinstance(each, type) and issubclass(each, Options):
                return each
    return Options


def methods() -> dict[str, Method]:
    """Return all methods by name: built-in ones, those of installed packages, and registered ones.

    An installed package declares its methods as entry points in the group `fedloom.methods`.

    Raises:
        InputError: An entry point cannot be loaded.
    """
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


def import_method_file(path: str) -> None:
    """Run a Python file that registers methods. A file that has been run is not run again.

    Args:
        path: The file.

    Raises:
        InputError: There is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {path!r} to import.")
    run_user_file(file, f"fedloom_imported_{file.stem}")
