"""What a network is in the catalogue, and how its name and options are read: `resnet18:norm=group,stem=imagenet`."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args, get_origin

from torch import Tensor, nn

from fedloom.errors import InputError, unknown
from fedloom.settings import Settings, validated

Shape = tuple[int, ...]


class Fixed(Settings):
    """The options of a network that has none."""


O = TypeVar("O", bound=Settings)  # noqa: E741


@dataclass(frozen=True)
class Wanted:
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
class Network(Generic[O]):
    """An entry of the catalogue."""

    summary: str
    make: Callable[[Wanted, O], nn.Module]
    options: type[O]
    text: tuple[int, int] | None = None
    """Of a network for text: the length and the number of classes that its published size is for."""
    count: Callable[[Wanted, O], int] | None = None
    """How many trainable parameters there are, where making the network needs a library that may be missing."""


def repeated(x: Tensor, channels: int) -> Tensor:
    """Images with so many channels: grey ones have their only channel again and again."""
    return x if x.shape[1] == channels else x.expand(-1, channels, -1, -1)


def parse(name: str, options: type[O]) -> O:
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
            raise unknown(f"option of {base}", key, known)
        if key in given:
            raise InputError(f"model {base!r}: {key} is given twice, as {given[key]!r} and as {value!r}.")
        kind = known[key].annotation
        if get_origin(kind) is Literal:
            _choose(base, key, value, get_args(kind))
        given[key] = value
    try:
        return validated(options, given)
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
