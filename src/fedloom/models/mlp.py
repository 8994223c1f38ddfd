"""Logistic regression and multilayer perceptrons."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

from torch import nn

from fedloom.models.base import ModelRequest, ModelSpec
from fedloom.utils.settings import Settings


def make_mlp_layers(sizes: list[int], classes: int, dropout: float = 0.0) -> "OrderedDict[str, nn.Module]":
    """Return flatten, hidden layers and head. `sizes` holds the number of inputs and the widths."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (before, after) in enumerate(pairwise(sizes), 1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"fc{i}_relu"] = nn.ReLU()
        if dropout:
            layers[f"fc{i}_dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(sizes[-1], classes)
    return layers


def _make_mlp_builder(*hidden: int) -> Callable[[ModelRequest, Settings], nn.Module]:
    """Return a function that builds a dense network for inputs of any shape."""

    def make(wanted: ModelRequest, _: Settings) -> nn.Module:
        return nn.Sequential(make_mlp_layers([prod(wanted.shape), *hidden], wanted.classes))

    return make


NETWORKS: dict[str, ModelSpec[Any]] = {
    "logreg": ModelSpec("multinomial logistic regression", _make_mlp_builder(), Settings),
    "mlp": ModelSpec("two hidden layers of 200 (McMahan's 2NN)", _make_mlp_builder(200, 200), Settings),
    "mlp-128": ModelSpec("two hidden layers of 128 (DynaFed's MLP)", _make_mlp_builder(128, 128), Settings),
}
