"""What a network is in the catalogue, and how its name and options are read: `resnet18:norm=group,stem=imagenet`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.utils.settings import Settings

Shape = tuple[int, ...]


class NoModelOptions(Settings):
    """The options of a network that has none."""


O = TypeVar("O", bound=Settings)  # noqa: E741


@dataclass(frozen=True)
class ModelRequest:
    """What a network is to be made for."""

    name: str
    """As a person gave it, options and all."""
    shape: Shape
    """Of one input."""
    classes: int
    tokens: int = 0
    """How many different tokens the data have; 0 where they do not say."""

    def images(self, smallest: int = 1, colour: bool = False) -> tuple[int, int, int]:
        """Channels, height and width, where inputs are images whose sides have `smallest` pixels or more.

        A network for `colour` images has three channels; grey ones are repeated (`repeated`).
        """
        if len(self.shape) != 3:
            raise InputError(
                f"model {self.name!r} cannot take inputs of shape {self.shape}; it wants images, (C, H, W)."
            )
        channels, height, width = self.shape
        if min(height, width) < smallest:
            raise InputError(
                f"model {self.name!r} cannot take images of {height} x {width} pixels; the smallest it takes "
                f"have {smallest} x {smallest}."
            )
        if colour and channels not in (1, 3):
            raise InputError(f"model {self.name!r} cannot take images of {channels} channels; it takes 1 or 3.")
        return 3 if colour else channels, height, width

    def length(self) -> int:
        """How many tokens an input has, where inputs are text."""
        if len(self.shape) != 1:
            raise InputError(
                f"model {self.name!r} cannot take inputs of shape {self.shape}; it wants rows of tokens, (length,)."
            )
        return self.shape[0]


@dataclass(frozen=True)
class ModelSpec(Generic[O]):
    """An entry of the catalogue."""

    summary: str
    make: Callable[[ModelRequest, O], nn.Module]
    options: type[O]
    text: tuple[int, int] | None = None
    """Of a network for text: the length and the number of classes that its published size is for."""
    count: Callable[[ModelRequest, O], int] | None = None
    """How many trainable parameters there are, where making the network needs a library that may be missing."""


def expand_model_input_channels(x: Tensor, channels: int) -> Tensor:
    """Images with so many channels: grey ones have their only channel again and again."""
    return x if x.shape[1] == channels else x.expand(-1, channels, -1, -1)
