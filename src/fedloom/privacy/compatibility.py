"""Which methods can run on a private mean, and why the others cannot.

The parts of a method say what they need (`needs`), and why (`needs_reason`); the rest follows from their code.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.core.layout import Layout
from fedloom.errors import InputError
from fedloom.methods.base import Server
from fedloom.methods.composition import ComposedMethod, MethodParts, compose


def compose_privacy_compatible(name: str, options: Mapping[str, Mapping[str, Any]]) -> ComposedMethod:
    """Return the method `name` with these options and equal client weights, as in a private mean.

    The brackets, `local` and `centralized`, run without privacy, so they stay as they are.
    """
    composed_method = compose(name, options)
    if composed_method.bracket is not None:
        return composed_method
    _check_methods(composed_method)
    server = composed_method.owner("server")
    if server is None or "weighting" not in server.options.model_fields:
        return composed_method
    server_options = {"weighting": "uniform", **options.get(server.name, {})}
    if server_options["weighting"] != "uniform":
        raise InputError(
            f"{server.name}.weighting is {server_options['weighting']!r}, but with clip_update all clients have "
            "the same weight: with a larger one a client could move the mean further than the clip."
        )
    equal_weights = composed_method.options[server.name].model_copy(update={"weighting": "uniform"})
    return replace(composed_method, options={**composed_method.options, server.name: equal_weights})


def _check_methods(composed_method: ComposedMethod) -> None:
    """Raise an InputError if a method needs single updates."""
    for method in composed_method.methods:
        if (part := method.part_that_needs_updates) is not None:
            reason = part.needs_reason or f'needs single updates ({part.__name__}.needs is "updates")'
            raise InputError(
                f"{method.name} cannot be run with clip_update: its server {reason}, but a private server sees only "
                "the mean of all updates."
            )


def check_private_method(composed_method: ComposedMethod, parts: MethodParts, layout: Layout) -> None:
    """Raise an InputError if the parts or the network would reveal more than the private mean."""
    _check_methods(composed_method)
    names = {part: owner.name for part in ("server", "client") if (owner := composed_method.owner(part)) is not None}
    if uploads := parts.client.upload_shapes(layout):
        raise InputError(
            f"{names['client']} cannot be run with clip_update: its clients send {', '.join(uploads)} beside the "
            "model, without clipping and noise."
        )
    if parts.client.personal_columns(layout):
        raise InputError(
            f"{names['client']} cannot be run with clip_update: a part of the model stays with the clients, and the "
            "global model would hold the mean of these parts without noise."
        )
    if type(parts.server).sample_clients is not Server.sample_clients:
        raise InputError(
            f"{names['server']} cannot be run with clip_update: it chooses its clients in its own way, but the "
            "accountant assumes random sampling."
        )
    first, second = parts.server.dispatch(0, [0, 0])
    if first.row.data_ptr() != second.row.data_ptr():
        raise InputError(
            f"{names['server']} cannot be run with clip_update: it sends every client a model of its own, so the "
            "updates do not belong to one model."
        )
    if layout.size > layout.trainable:
        buffer = next(entry.name for entry in layout.entries if entry.offset >= layout.trainable)
        raise InputError(
            f"this network cannot be trained with clip_update: {buffer} is a statistic and not a weight, and noise "
            "can make it useless (a negative variance); choose a network without batch norm, such as norm=group."
        )
