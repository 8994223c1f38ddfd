"""What there is to choose from, as plain data: for `fedloom list`, programs, and the docs."""

from collections.abc import Callable
from typing import Any


def list_methods() -> list[dict[str, Any]]:
    """The methods, the parts they bring, what they cost, and their options."""
    from fedloom.methods import methods

    return [
        {
            "name": method.name,
            "brings": list(method.parts),
            "year": method.year,
            "summary": method.summary,
            "models a round": method.models_sent,
            "client keeps": method.client_keeps,
            "server keeps": method.server_keeps,
            "extra compute": method.extra_compute,
            "server data": method.server_data or "no",
            "reference": method.reference,
            "options": [
                {"name": name, "default": field.default, "help": field.description}
                for name, field in method.options.model_fields.items()
            ],
        }
        for method in methods().values()
    ]


def list_datasets() -> list[dict[str, Any]]:
    """The data sets, and whether they are on this machine."""
    from fedloom.data.datasets import catalogue

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "classes": info.classes,
            "shape": list(info.shape),
            "training": info.samples,
            "test": info.test_samples,
            "state": info.state,
            "found": str(info.found) if info.found else None,
            "missing": list(info.missing),
            "get": info.get or None,
        }
        for info in catalogue()
    ]


def list_models() -> list[dict[str, Any]]:
    """The networks, their sizes, and their options."""
    from fedloom.models import catalogue

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "parameters, 1 x 28 x 28": info.parameters_1x28x28,
            "parameters, 3 x 32 x 32": info.parameters_3x32x32,
            "parameters, text": info.parameters_text,
            "options": [
                {"name": option.name, "default": option.default, "help": option.help} for option in info.options
            ],
        }
        for info in catalogue()
    ]


def list_partitions() -> list[dict[str, Any]]:
    """The ways to spread samples over clients."""
    from fedloom.data.partition import catalogue

    return [{"name": info.spec, "summary": info.summary} for info in catalogue()]


LISTINGS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "methods": list_methods,
    "datasets": list_datasets,
    "models": list_models,
    "partitions": list_partitions,
}
