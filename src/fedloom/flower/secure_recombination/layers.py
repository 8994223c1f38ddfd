"""Layers that clients exchange, derived from the run's method.

Server and sites each derive them.
"""

from fedloom.core.layout import Layout
from fedloom.methods._support.layer_exchange import LayerExchange
from fedloom.methods.composition import ComposedMethod
from fedloom.methods.fedmr import FedMROptions, FedMRServer


def make_layer_exchange(method: ComposedMethod, layout: Layout, round: int) -> LayerExchange | None:
    """Return what the clients exchange in a round before they upload, or None."""
    owner, server = method.owner("server"), method.part_class("server")
    options = method.options[owner.name] if owner is not None else None
    if not issubclass(server, FedMRServer) or not isinstance(options, FedMROptions):
        return None
    return server.layer_exchange(layout, options, round)
