"""Public names of fedloom, a library for federated learning on heterogeneous data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom._version import __version__

if TYPE_CHECKING:
    from fedloom.config import Config
    from fedloom.core.averaging import WeightedMean
    from fedloom.core.layout import Layout
    from fedloom.core.tasks import ClientTask, ClientUpdate
    from fedloom.data import FederatedDataset, Samples
    from fedloom.errors import FedloomError, InputError
    from fedloom.methods import (
        AveragingServer,
        Client,
        Extras,
        Method,
        MethodContext,
        Options,
        Refiner,
        Server,
        register,
    )
    from fedloom.runs.callback import Callback
    from fedloom.runs.compare import ComparisonResult, compare
    from fedloom.runs.execute import resume, run, verify
    from fedloom.runs.result import RunResult
    from fedloom.training.batches import Batch
    from fedloom.training.trainer import LocalSteps, LocalTrainer

_FILES = {
    "fedloom.config": ("Config",),
    "fedloom.core.averaging": ("WeightedMean",),
    "fedloom.core.layout": ("Layout",),
    "fedloom.core.tasks": ("ClientTask", "ClientUpdate"),
    "fedloom.data": ("FederatedDataset", "Samples"),
    "fedloom.errors": ("FedloomError", "InputError"),
    "fedloom.methods": (
        "AveragingServer",
        "Client",
        "Extras",
        "Method",
        "MethodContext",
        "Options",
        "Refiner",
        "Server",
        "register",
    ),
    "fedloom.runs.callback": ("Callback",),
    "fedloom.runs.compare": ("ComparisonResult", "compare"),
    "fedloom.runs.execute": ("resume", "run", "verify"),
    "fedloom.runs.result": ("RunResult",),
    "fedloom.training.batches": ("Batch",),
    "fedloom.training.trainer": ("LocalSteps", "LocalTrainer"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Processes of a site that only pass messages then do not load PyTorch."""
    if name not in _FILE_OF:
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_FILE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AveragingServer",
    "Batch",
    "Callback",
    "Client",
    "ClientTask",
    "ClientUpdate",
    "ComparisonResult",
    "Config",
    "Extras",
    "FederatedDataset",
    "FedloomError",
    "InputError",
    "Layout",
    "LocalSteps",
    "LocalTrainer",
    "Method",
    "MethodContext",
    "Options",
    "Refiner",
    "RunResult",
    "Samples",
    "Server",
    "WeightedMean",
    "__version__",
    "compare",
    "register",
    "resume",
    "run",
    "verify",
]
