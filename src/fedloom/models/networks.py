"""The catalogue of the papers' networks: plain modules whose tensors keep their names and order.

Each ends in a linear layer called `head`; what comes before it is the body. Parameters belong to leaf modules, which
are what FedMR calls layers. `NAME+projection` is a network with MOON's projection before its head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedloom.errors import InputError, unknown
from fedloom.models import convolutional, dense, recurrent, resnet, vgg, vit
from fedloom.models.base import Network, Shape, Wanted, parse
from fedloom.models.projection import added, project, split

NETWORKS: dict[str, Network[Any]] = {
    **dense.NETWORKS,
    **convolutional.NETWORKS,
    **resnet.NETWORKS,
    **vgg.NETWORKS,
    **vit.NETWORKS,
    **recurrent.NETWORKS,
}


@dataclass(frozen=True)
class Option:
    """Something that may be set behind a network's name."""

    name: str
    default: Any
    help: str


@dataclass(frozen=True)
class ModelInfo:
    """A network, how many trainable parameters it has, and its options.

    Sizes are for ten classes, and None for a network that does not take images; the size for text is that of the data
    the network was made for.
    """

    name: str
    summary: str
    parameters_1x28x28: int | None
    parameters_3x32x32: int | None
    parameters_text: int | None
    options: tuple[Option, ...]


def build(name: str, shape: Shape, classes: int, tokens: int = 0) -> nn.Module:
    """The network `name` for inputs of `shape`, such as (3, 32, 32), and as many outputs as `classes`.

    Options may follow the name, as in `resnet18:norm=group,stem=imagenet`. Weights are as random as usual, drawn from
    the global generator. The shape of text is (length,); `tokens` says how many different ones the data have, where
    that is known and the name does not say it.
    """
    plain, projected = split(name)
    network, wanted, options = _find(plain, shape, classes, tokens)
    made: nn.Module = network.make(wanted, options)
    return project(made) if projected else made


def count(name: str, shape: Shape, classes: int, tokens: int = 0) -> int:
    """How many trainable parameters `build` gives, without the memory for them and without drawing a number."""
    plain, projected = split(name)
    network, wanted, options = _find(plain, shape, classes, tokens)
    if network.count is not None:
        known = network.count(wanted, options)
        one_class = network.count(replace(wanted, classes=classes + 1), options) - known  # its weights and its bias
        return known + (added(one_class - 1, classes) if projected else 0)
    with torch.device("meta"):
        made = build(name, shape, classes, tokens)
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


def catalogue() -> list[ModelInfo]:
    """All networks."""
    return [_info(name, network) for name, network in NETWORKS.items()]


def _find(name: str, shape: Shape, classes: int, tokens: int) -> tuple[Network[Any], Wanted, Any]:
    base = name.partition(":")[0]
    if base not in NETWORKS:
        raise unknown("model", base, NETWORKS)
    options = parse(name, NETWORKS[base].options)
    if not shape or min(shape) < 1:
        raise InputError(f"a model cannot take inputs of shape {shape}; expected sizes of at least 1.")
    if classes < 1:
        raise InputError(f"a model cannot have {classes} classes; expected at least 1.")
    if tokens < 0:
        raise InputError(f"a model cannot know {tokens} tokens; expected 0 or more.")
    return NETWORKS[base], Wanted(name, shape, classes, tokens), options


def _info(name: str, network: Network[Any]) -> ModelInfo:
    grey = colour = text = None
    if network.text is not None:
        length, classes = network.text
        text = count(name, (length,), classes)
    else:
        grey, colour = count(name, (1, 28, 28), 10), count(name, (3, 32, 32), 10)
    fields = network.options.model_fields
    options = tuple(Option(key, field.default, field.description or "") for key, field in fields.items())
    return ModelInfo(name, network.summary, grey, colour, text, options)
