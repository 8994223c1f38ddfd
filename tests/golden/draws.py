"""Record every random stream that a run uses, in each of its processes.

A line is seed|purpose|round|client. This file imports no fedloom and nothing heavy, because Flower's processes load it
through `hook/sitecustomize.py`.
"""

import inspect
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

NOTES = "FEDLOOM_GOLDEN_DRAWS"
"""The environment names the file that draws are noted in."""
STOP = "FEDLOOM_GOLDEN_STOP"
"""purpose|round: when this stream is made, the process gets a Ctrl-C, which ends the run after that round."""
TABLE = Path(__file__).with_name("changes.toml")


def places() -> dict[str, tuple[str, str]]:
    """By module, the class and the method that make the key of a stream: where they are, or were."""
    found = {}
    for place in tomllib.loads(TABLE.read_text())["streams"]:
        module, _, attribute = place.partition(":")
        owner, _, method = attribute.partition(".")
        found[module] = owner, method
    return found


def _note(arguments: dict[str, Any]) -> None:
    streams, purpose, round, client = arguments.values()  # the names of the last two may change
    if path := os.environ.get(NOTES):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # a short line is written whole or not at all
        try:
            os.write(file, f"{streams.seed}|{purpose}|{round}|{client}\n".encode())
        finally:
            os.close(file)
    if os.environ.get(STOP) == f"{purpose}|{round}":
        os.kill(os.getpid(), signal.SIGINT)


def _noting(make_key: Callable[..., int]) -> Callable[..., int]:
    signature = inspect.signature(make_key)

    @wraps(make_key)
    def noted(*positional: Any, **named: Any) -> int:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        _note(bound.arguments)
        return make_key(*positional, **named)

    return noted


@contextmanager
def noted() -> Iterator[None]:
    """Note the draws of a fedloom that is imported already."""
    (module, (owner, method)), *more = [(m, place) for m, place in places().items() if m in sys.modules]
    assert not more, "both trees name their streams alike"
    kind = getattr(sys.modules[module], owner)
    make_key = getattr(kind, method)
    setattr(kind, method, _noting(make_key))
    try:
        yield
    finally:
        setattr(kind, method, make_key)


class _Finder(MetaPathFinder):
    """Finds the modules of streams as usual, and makes them note draws."""

    def __init__(self) -> None:
        self.places = places()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.places:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load, (owner, method) = spec.loader.exec_module, self.places[name]

        def load_and_note(module: ModuleType) -> None:
            load(module)
            kind = getattr(module, owner)
            setattr(kind, method, _noting(getattr(kind, method)))

        spec.loader.exec_module = load_and_note  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Note the draws of a fedloom that this process may import later."""
    sys.meta_path.insert(0, _Finder())
