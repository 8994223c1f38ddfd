"""Which methods can be run on a private mean, and why the others cannot.

A method says in the catalogue what its server does with single answers (`needs_each`); the rest is read off its parts.
"""

from collections.abc import Mapping
from typing import Any

from fedloom.core.layout import Layout
from fedloom.errors import InputError
from fedloom.methods.base import Server
from fedloom.methods.composition import ComposedMethod, MethodParts, compose
from fedloom.methods.registry import Method


def compose_with_privacy(name: str, given: Mapping[str, Mapping[str, Any]]) -> ComposedMethod:
    """The method `name` with these options, and with clients that all count alike, as they do in a private mean."""
    composition = compose(name, given)
    _check_methods(composition)
    server = composition.owner("server")
    if server is None or "weighting" not in server.options.model_fields:
        return composition
    options = {"weighting": "uniform", **given.get(server.name, {})}
    if options["weighting"] != "uniform":
        raise InputError(
            f"{server.name}.weighting is {options['weighting']!r}, but with clip_update all clients count alike: a "
            "weight of its own would let a client move the mean further than the clip."
        )
    return compose(name, {**given, server.name: options})


def _check_methods(composition: ComposedMethod) -> None:
    """Refuse methods that must see single answers."""
    for method in composition.methods:
        if not method.needs_mean_only:
            raise InputError(f"{method.name} cannot be run with clip_update: {_incompatibility_reason(method)}.")


def _incompatibility_reason(method: Method) -> str:
    """Why this method's server needs more than a mean, as the end of a sentence; "" where it does not."""
    if method.needs_mean_only:
        return ""
    if method.needs_each is None:
        return "it does not say (needs_each) that its server needs the mean of the answers alone"
    return f"its server {method.needs_each}, where a private server sees only the mean of all"


def check_private_method(composition: ComposedMethod, parts: MethodParts, layout: Layout) -> None:
    """Refuse parts and networks of which more would be revealed than the private mean."""
    _check_methods(composition)
    _refuse_parts(composition, parts, layout)
    if layout.size > layout.trainable:
        buffer = next(entry.name for entry in layout.entries if entry.offset >= layout.trainable)
        raise InputError(
            f"this network cannot be trained with clip_update: {buffer} is a statistic and not a weight, which noise "
            "may make useless (a negative variance); choose one without batch norm, such as with norm=group."
        )


def _refuse_parts(composition: ComposedMethod, parts: MethodParts, layout: Layout) -> None:
    names = {part: owner.name for part in ("server", "local") if (owner := composition.owner(part)) is not None}
    if uploads := parts.local.uploads(layout):
        raise InputError(
            f"{names['local']} cannot be run with clip_update: its clients send {', '.join(uploads)} beside the model, "
            "which is neither clipped nor noisy."
        )
    if parts.local.stays_home(layout):
        raise InputError(
            f"{names['local']} cannot be run with clip_update: a part of the model stays with the clients, and the "
            "deployed model would hold the mean of these without noise."
        )
    if type(parts.server).select is not Server.select:
        raise InputError(
            f"{names['server']} cannot be run with clip_update: it chooses its clients in its own way, and the account "
            "is that of clients drawn at random."
        )
    first, second = parts.server.dispatch(0, [0, 0])
    if first.row.data_ptr() != second.row.data_ptr():
        raise InputError(
            f"{names['server']} cannot be run with clip_update: it sends every client a model of its own, which are "
            "then not updates of one model."
        )
