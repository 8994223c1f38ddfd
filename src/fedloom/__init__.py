"""Federated learning on heterogeneous data: many models on the server, exact runs, one command."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom._version import __version__

if TYPE_CHECKING:
    from fedloom.api import resume, run, verify
    from fedloom.bench import Batch, Bench, Pass
    from fedloom.comparing import Compared, compare
    from fedloom.data import Federation, Samples
    from fedloom.errors import FedloomError, InputError
    from fedloom.exchange import Job, Update
    from fedloom.finished import Run
    from fedloom.methods import Companion, Context, Local, Method, Options, Refiner, Server, register
    from fedloom.pretraining import Pretrained, pretrain
    from fedloom.rows import Layout, Mean

_FILES = {
    "fedloom.api": ("resume", "run", "verify"),
    "fedloom.bench": ("Batch", "Bench", "Pass"),
    "fedloom.comparing": ("Compared", "compare"),
    "fedloom.data": ("Federation", "Samples"),
    "fedloom.errors": ("FedloomError", "InputError"),
    "fedloom.exchange": ("Job", "Update"),
    "fedloom.finished": ("Run",),
    "fedloom.methods": ("Companion", "Context", "Local", "Method", "Options", "Refiner", "Server", "register"),
    "fedloom.pretraining": ("Pretrained", "pretrain"),
    "fedloom.rows": ("Layout", "Mean"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: a site takes messages in processes that need no torch."""
    if name not in _FILE_OF:
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FILE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Batch",
    "Bench",
    "Companion",
    "Compared",
    "Context",
    "Federation",
    "FedloomError",
    "InputError",
    "Job",
    "Layout",
    "Local",
    "Mean",
    "Method",
    "Options",
    "Pass",
    "Pretrained",
    "Refiner",
    "Run",
    "Samples",
    "Server",
    "Update",
    "__version__",
    "compare",
    "pretrain",
    "register",
    "resume",
    "run",
    "verify",
]
