"""Registry of methods: built in, of installed packages, of a user's file."""

import importlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from fedloom.errors import FedloomError, InputError
from fedloom.methods.base import Client, Extras, Options, Refiner, Server
from fedloom.utils.system import run_user_file

BUILT_IN = {
    "abavg": "abavg",
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
    """Models sent in a round with K clients, down and up together, such as "2K"."""
    client_state: str = "nothing"
    """What each client that has trained keeps between rounds."""
    server_state: str = "1 model"
    """What the server keeps between rounds, with N clients of which K train in a round."""
    extra_compute: str = "none"
    """What is computed beyond FedAvg's training and mean, and by whom."""
    uses_single_updates: str | None = None
    """What the server does with single updates, such as "crosses the clients' models".

    "" if their weighted mean is enough. None: not specified; a method that provides only a client needs no more."""
    server_data: Literal["inputs", "labels"] | None = None
    """Which data it needs on the server: inputs, or inputs and labels; None: no data."""
    rescales: bool = False
    """Whether the server scales the mean of the client models by a factor of its own."""

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
    def needs_mean_only(self) -> bool:
        """Whether the mean of the updates is enough for the server. A client part is no obstacle."""
        return self.uses_single_updates == "" or (self.uses_single_updates is None and self.parts == ("client",))


_methods: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Register a method under its name.

    You may register your own method again, for example in a notebook. You cannot replace a built-in one.

    Args:
        method: The method.

    Returns:
        The same method.

    Raises:
        InputError: The name is that of a built-in method, or has other characters than letters, digits, `-` and `_`.

    Example:
        register(Method("my-noise", "add noise to gradients", "Doe, 2025", options=NoiseOptions, client=NoiseClient))
    """
    module = f"fedloom.methods.{BUILT_IN.get(method.name)}"
    if method.name in BUILT_IN and all(getattr(method, part).__module__ != module for part in method.parts):
        raise InputError(f"there is already a method {method.name!r}; give yours another name.")
    if not method.name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"a method's name is letters, digits, '-' and '_', not {method.name!r}.")
    _methods[method.name] = method
    return method


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


def import_file(path: str) -> None:
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
