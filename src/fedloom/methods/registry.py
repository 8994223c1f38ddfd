"""The methods by name, and how names compose: `fedcross+fedprox` is FedCross's server with FedProx's clients."""

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
    "naivemix": "fedmix",
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
    local: type[Client[Any]] | None = None
    companion: type[Extras[Any]] | None = None
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
    run_user_file(file, f"fedloom_imported_{file.stem}")
