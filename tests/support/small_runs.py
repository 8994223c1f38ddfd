"""Runs of a second, from Python and from the command line.

Tests of faults in a run use them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedloom

Command = Callable[..., Any]
TINY: dict[str, Any] = {
    "clients": 6,
    "clients_per_round": 6,
    "rounds": 3,
    "model": "logreg",
    "epochs": 1,
    "report": False,
}
TINY_OPTIONS = ("--clients", 6, "--clients-per-round", 6, "--rounds", 3, "--model", "logreg", "--epochs", 1)


def tiny(folder: Path, method: str, **settings: Any) -> fedloom.RunResult:
    return fedloom.run(method, out=folder, **{**TINY, **settings})
