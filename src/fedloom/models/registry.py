"""The catalogue of the papers' networks: plain modules whose tensors keep their names and order.

Each ends in a linear layer called `head`; what comes before it is the body. Parameters belong to leaf modules, which
are what FedMR calls layers. `NAME+projection` is a network with MOON's projection before its head.
"""

import difflib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import torch
from torch import nn

from fedloom.errors import InputError, unknown_name_error
from fedloom.models import cnn, lstm, mlp, resnet, vgg, vit
from fedloom.models.base import ModelRequest, ModelSpec, O, Shape
from fedloom.utils.settings import validate_settings


def _parse_model_options(name: str, options: type[O]) -> O:
    """The options behind the colon of a model's name. What is wrong with them is said in one sentence."""
    base, colon, text = name.partition(":")
    known = options.model_fields
    if colon and not known:
        raise InputError(f"model {base!r} has no options, so {name!r} makes no sense.")
    given: dict[str, str] = {}
    for pair in text.split(",") if colon else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise InputError(f"options of a model are given as {base}:NAME=VALUE,NAME=VALUE, not {name!r}.")
        if key not in known:
            raise unknown_name_error(f"option of {base}", key, known)
        if key in given:
            raise InputError(f"model {base!r}: {key} is given twice, as {given[key]!r} and as {value!r}.")
        kind = known[key].annotation
        if get_origin(kind) is Literal:
            _choose(base, key, value, get_args(kind))
        given[key] = value
    try:
        return validate_settings(options, given)
    except InputError as error:
        raise InputError(f"model {base!r}: {error}") from None


def _choose(base: str, key: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    plain = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(value.lower(), plain, n=1, cutoff=0.5)
    hint = f"; did you mean {plain[near[0]]!r}?" if near else "."
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
    raise InputError(f"model {base!r}: {key} must be {listed}, not {value!r}{hint}")


SUFFIX = "+projection"
WIDTH = 256


def _split_projection(name: str) -> tuple[str, bool]:
    """A model's name without the suffix, and whether it was there; options behind a colon stay."""
    base, colon, options = name.partition(":")
    return base.removesuffix(SUFFIX) + colon + options, base.endswith(SUFFIX)


def _add_projection(network: nn.Module) -> nn.Module:
    """Put the projection before the linear layer `head` of a network, which is made anew for its width."""
    old = network.get_submodule("head")
    assert isinstance(old, nn.Linear), "all networks of the catalogue end so"
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        fc1=nn.Linear(old.in_features, old.in_features),
        relu=nn.ReLU(),
        fc2=nn.Linear(old.in_features, WIDTH),
        head=nn.Linear(WIDTH, old.out_features),
    )
    network.head = nn.Sequential(layers)
    return network


def _projection_parameter_count(representation: int, classes: int) -> int:
    """How many more parameters a network has with a projection."""
    projection = (representation + 1) * representation + (representation + 1) * WIDTH
    return projection + (WIDTH - representation) * classes


NETWORKS: dict[str, ModelSpec[Any]] = {
    **mlp.NETWORKS,
    **cnn.NETWORKS,
    **resnet.NETWORKS,
    **vgg.NETWORKS,
    **vit.NETWORKS,
    **lstm.NETWORKS,
}


@dataclass(frozen=True)
class _ModelOption:
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
    options: tuple[_ModelOption, ...]


def build_model(name: str, shape: Shape, classes: int, tokens: int = 0) -> nn.Module:
    """The network `name` for inputs of `shape`, such as (3, 32, 32), and as many outputs as `classes`.

    Options may follow the name, as in `resnet18:norm=group,stem=imagenet`. Weights are as random as usual, drawn from
    the global generator. The shape of text is (length,); `tokens` says how many different ones the data have, where
    that is known and the name does not say it.
    """
    plain, projected = _split_projection(name)
    network, wanted, options = _find(plain, shape, classes, tokens)
    made: nn.Module = network.make(wanted, options)
    return _add_projection(made) if projected else made


def count_parameters(name: str, shape: Shape, classes: int, tokens: int = 0) -> int:
    """How many trainable parameters `build` gives, without the memory for them and without drawing a number."""
    plain, projected = _split_projection(name)
    network, wanted, options = _find(plain, shape, classes, tokens)
    if network.count is not None:
        known = network.count(wanted, options)
        one_class = network.count(replace(wanted, classes=classes + 1), options) - known  # its weights and its bias
        return known + (_projection_parameter_count(one_class - 1, classes) if projected else 0)
    with torch.device("meta"):
        made = build_model(name, shape, classes, tokens)
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


def available_models() -> list[ModelInfo]:
    """All networks."""
    return [_info(name, network) for name, network in NETWORKS.items()]


def _find(name: str, shape: Shape, classes: int, tokens: int) -> tuple[ModelSpec[Any], ModelRequest, Any]:
    base = name.partition(":")[0]
    if base not in NETWORKS:
        raise unknown_name_error("model", base, NETWORKS)
    options = _parse_model_options(name, NETWORKS[base].options)
    if not shape or min(shape) < 1:
        raise InputError(f"a model cannot take inputs of shape {shape}; expected sizes of at least 1.")
    if classes < 1:
        raise InputError(f"a model cannot have {classes} classes; expected at least 1.")
    if tokens < 0:
        raise InputError(f"a model cannot know {tokens} tokens; expected 0 or more.")
    return NETWORKS[base], ModelRequest(name, shape, classes, tokens), options


def _info(name: str, network: ModelSpec[Any]) -> ModelInfo:
    grey = colour = text = None
    if network.text is not None:
        length, classes = network.text
        text = count_parameters(name, (length,), classes)
    else:
        grey, colour = count_parameters(name, (1, 28, 28), 10), count_parameters(name, (3, 32, 32), 10)
    fields = network.options.model_fields
    options = tuple(_ModelOption(key, field.default, field.description or "") for key, field in fields.items())
    return ModelInfo(name, network.summary, grey, colour, text, options)
