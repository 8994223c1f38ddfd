"""Methods, one file a paper."""

from fedloom.methods.base import Companion, Context, Local, Options, Part, Refiner, Server
from fedloom.methods.catalogue import Composition, Method, Parts, compose, import_file, methods, register

__all__ = [
    "Companion",
    "Composition",
    "Context",
    "Local",
    "Method",
    "Options",
    "Part",
    "Parts",
    "Refiner",
    "Server",
    "compose",
    "import_file",
    "methods",
    "register",
]
