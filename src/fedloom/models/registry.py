"""Networks by name: `build_model`, `available_models`, `count_parameters`.

Networks are plain modules whose tensors keep their names and order. Each ends in a linear layer called `head`; the rest
is the body. Parameters belong to leaf modules, which FedMR calls layers. `NAME+projection` is a network with MOON's
projection before its head.
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
    """Parse and validate the options after the colon of a model's name."""
    base, colon, text = name.partition(":")
    known = options.model_fields
    if colon and not known:
        raise InputError(f"model {base!r} has no options; give its name alone, not {name!r}.")
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
    """Return a model's name without the suffix, and whether it had one. Options after the colon stay."""
    base, colon, options = name.partition(":")
    return base.removesuffix(SUFFIX) + colon + options, base.endswith(SUFFIX)


def _add_projection(network: nn.Module) -> nn.Module:
    """Insert the projection before the linear layer `head`, which is replaced by one of the new width."""
    old = network.get_submodule("head")
    assert isinstance(old, nn.Linear), "every network of the registry ends in a linear head"
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        fc1=nn.Linear(old.in_features, old.in_features),
        relu=nn.ReLU(),
        fc2=nn.Linear(old.in_features, WIDTH),
        head=nn.Linear(WIDTH, old.out_features),
    )
    network.head = nn.Sequential(layers)
    return network


def _projection_parameter_count(representation: int, classes: int) -> int:
    """Return how many parameters a projection adds to a network."""
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
    """An option of a network."""

    name: str
    default: Any
    help: str


@dataclass(frozen=True)
class ModelInfo:
    """A network of `available_models`: its size and options.

    Attributes:
        name: The name for `build_model`.
        summary: One line about the network.
        parameters_1x28x28: Trainable parameters for ten classes of 1 x 28 x 28 images; None for text.
        parameters_3x32x32: Trainable parameters for ten classes of 3 x 32 x 32 images; None for text.
        parameters_text: Trainable parameters for the data that the network was made for; None for images.
        options: The options, each with `name`, `default` and `help`.
    """

    name: str
    summary: str
    parameters_1x28x28: int | None
    parameters_3x32x32: int | None
    parameters_text: int | None
    options: tuple[_ModelOption, ...]


def build_model(name: str, shape: Shape, classes: int, vocabulary_size: int = 0) -> nn.Module:
    """Build a network by name. Its random weights come from torch's global generator.

    Args:
        name: A name of `available_models`, with options if you like: `resnet18:norm=group,stem=imagenet`.
        shape: The shape of one input: (channels, height, width) for images, such as (3, 32, 32), (length,) for text.
        classes: The number of outputs.
        vocabulary_size: The number of different tokens in the data; 0 if it is unknown or the name sets it.

    Returns:
        The network.

    Raises:
        InputError: The name or an option is unknown, or the network does not take such inputs.

    Example:
        network = build_model("resnet18:norm=group", (3, 32, 32), 10)
    """
    plain, projected = _split_projection(name)
    network, request, options = _find(plain, shape, classes, vocabulary_size)
    made: nn.Module = network.build(request, options)
    return _add_projection(made) if projected else made


def count_parameters(name: str, shape: Shape, classes: int, vocabulary_size: int = 0) -> int:
    """Return the number of trainable parameters of a network, without memory for them or random draws.

    Args:
        name: A name as for `build_model`.
        shape: The shape of one input.
        classes: The number of outputs.
        vocabulary_size: The number of different tokens in the data; 0 if it is unknown or the name sets it.

    Returns:
        The number of trainable parameters of `build_model(name, shape, classes, vocabulary_size)`.

    Raises:
        InputError: As for `build_model`.
    """
    plain, projected = _split_projection(name)
    network, request, options = _find(plain, shape, classes, vocabulary_size)
    if network.count_parameters is not None:
        known = network.count_parameters(request, options)
        one_class = (
            network.count_parameters(replace(request, classes=classes + 1), options) - known
        )  # weights and bias of one class
        return known + (_projection_parameter_count(one_class - 1, classes) if projected else 0)
    with torch.device("meta"):
        made = build_model(name, shape, classes, vocabulary_size)
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


def available_models() -> list[ModelInfo]:
    """List all networks.

    Returns:
        A `ModelInfo` for each.
    """
    found = []
    for name, network in NETWORKS.items():
        gray = color = text = None
        if network.text_size is not None:
            length, classes = network.text_size
            text = count_parameters(name, (length,), classes)
        else:
            gray, color = count_parameters(name, (1, 28, 28), 10), count_parameters(name, (3, 32, 32), 10)
        fields = network.options.model_fields
        options = tuple(_ModelOption(key, field.default, field.description or "") for key, field in fields.items())
        found.append(ModelInfo(name, network.summary, gray, color, text, options))
    return found


def _find(name: str, shape: Shape, classes: int, vocabulary_size: int) -> tuple[ModelSpec[Any], ModelRequest, Any]:
    base = name.partition(":")[0]
    if base not in NETWORKS:
        raise unknown_name_error("model", base, NETWORKS)
    options = _parse_model_options(name, NETWORKS[base].options)
    if not shape or min(shape) < 1:
        raise InputError(f"a model cannot take inputs of shape {shape}; expected sizes of at least 1.")
    if classes < 1:
        raise InputError(f"a model cannot have {classes} classes; expected at least 1.")
    if vocabulary_size < 0:
        raise InputError(f"a model cannot know {vocabulary_size} tokens; expected 0 or more.")
    return NETWORKS[base], ModelRequest(name, shape, classes, vocabulary_size), options
