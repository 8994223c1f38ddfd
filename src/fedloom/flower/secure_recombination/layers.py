"""Layers that clients exchange, derived from the run's settings.

Server and sites each derive them.
"""

from fedloom.config import Config
from fedloom.core.layout import Layout
from fedloom.methods._support.layer_exchange import LayerExchange
from fedloom.methods.fedmr import FedMROptions, FedMRServer
from fedloom.runs.resolve import resolve_method


def make_layer_exchange(config: Config, layout: Layout, round: int) -> LayerExchange | None:
    """Return what the clients exchange in a round before they upload, or None."""
    run = resolve_method(config)
    owner, server = run.owner("server"), run.part_class("server")
    options = run.options[owner.name] if owner is not None else None
    if not issubclass(server, FedMRServer) or not isinstance(options, FedMROptions):
        return None
    return server.layer_exchange(layout, options, round)
