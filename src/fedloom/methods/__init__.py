"""Federated methods: base classes, composition by name, and one file per paper."""

from fedloom.methods.base import Client, Extras, MethodContext, MethodPart, Options, Refiner, Server
from fedloom.methods.composition import ComposedMethod, MethodParts, compose
from fedloom.methods.registry import Method, import_method_file, methods, register
from fedloom.methods.servers import AveragingServer, MultiModelServer

__all__ = [
    "AveragingServer",
    "Client",
    "ComposedMethod",
    "Extras",
    "Method",
    "MethodContext",
    "MethodPart",
    "MethodParts",
    "MultiModelServer",
    "Options",
    "Refiner",
    "Server",
    "compose",
    "import_method_file",
    "methods",
    "register",
]
