"""ModelSpec, the registry entry of a network, and ModelRequest.

A request says what the network is built for.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.utils.settings import Settings

Shape = tuple[int, ...]


O = TypeVar("O", bound=Settings)  # noqa: E741


@dataclass(frozen=True)
class ModelRequest:
    """The name, input shape and classes of a network to build."""

    name: str
    """Name as the user gave it, with its options."""
    shape: Shape
    """Shape of one input."""
    classes: int
    vocabulary_size: int = 0
    """Number of different tokens in the data; 0 if unknown."""

    def image_shape(self, min_size: int = 1, color: bool = False) -> tuple[int, int, int]:
        """Return channels, height and width of images whose sides have at least `min_size` pixels.

        A `color` network has three channels; gray images are repeated (`expand_model_input_channels`).
        """
        if len(self.shape) != 3:
            raise InputError(
                f"model {self.name!r} cannot take inputs of shape {self.shape}; it expects images (C, H, W)."
            )
        channels, height, width = self.shape
        if min(height, width) < min_size:
            raise InputError(
                f"model {self.name!r} cannot take images of {height} x {width} pixels; it needs "
                f"at least {min_size} x {min_size}."
            )
        if color and channels not in (1, 3):
            raise InputError(f"model {self.name!r} cannot take images of {channels} channels; it takes 1 or 3.")
        return 3 if color else channels, height, width

    def sequence_length(self) -> int:
        """Return the number of tokens in an input of text."""
        if len(self.shape) != 1:
            raise InputError(
                f"model {self.name!r} cannot take inputs of shape {self.shape}; it expects rows of tokens (length,)."
            )
        return self.shape[0]


@dataclass(frozen=True)
class ModelSpec(Generic[O]):
    """An entry of the registry."""

    summary: str
    build: Callable[[ModelRequest, O], nn.Module]
    options: type[O]
    text_size: tuple[int, int] | None = None
    """Length and number of classes of a published network for text."""
    count_parameters: Callable[[ModelRequest, O], int] | None = None
    """Count the trainable parameters, if building the network needs a library that may be missing."""


def expand_model_input_channels(inputs: Tensor, channels: int) -> Tensor:
    """Return images with this many channels; the channel of gray images is repeated."""
    return inputs if inputs.shape[1] == channels else inputs.expand(-1, channels, -1, -1)


def copy_model(model: nn.Module, *, share_frozen: bool) -> nn.Module:
    """Copy a module. The copy shares the frozen weights, or has its own."""
    frozen = [p for p in model.parameters() if not p.requires_grad] if share_frozen else []
    return deepcopy(model, {id(p): p for p in frozen})
