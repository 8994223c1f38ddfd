"""Samples as they are stored, and how a stored batch becomes the input of a network."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import InputError

Array = NDArray[Any] | Tensor


@dataclass(frozen=True)
class Samples:
    """Inputs and labels, one row each.

    Images are uint8 in n x H x W x C: a quarter of the memory of floats, and channels-last network
    input is a view of them. Other integers are tokens, stored in whatever integer type holds them. Anything
    else is float32 in the shape the network takes. Labels are int64, or float where the task is a regression.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim == 0 or self.y.ndim == 0 or len(self.x) != len(self.y):
            raise InputError(
                f"inputs of shape {tuple(self.x.shape)} and labels of shape {tuple(self.y.shape)} do not "
                "pair up; expected one label for every input."
            )

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Array) -> "Samples":
        """The samples at the integer positions `index`, copied, in that order."""
        at = torch.as_tensor(index, dtype=torch.int64, device=self.x.device)
        return Samples(self.x.index_select(0, at), self.y.index_select(0, at))

    def __getitem__(self, part: slice) -> "Samples":
        """A stretch of the samples, as a view."""
        return Samples(self.x[part], self.y[part])

    @property
    def are_images(self) -> bool:
        return self.x.dtype == torch.uint8 and self.x.ndim == 4

    @property
    def are_tokens(self) -> bool:
        """Whether inputs are numbers of things, such as characters or words, and no quantities."""
        return is_integer_target(self.x) and not self.are_images

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one prepared input: C x H x W of images, else that of a stored row."""
        row = tuple(self.x.shape[1:])
        return (row[2], row[0], row[1]) if self.are_images else row

    def default_prepare(self) -> "InputTransform":
        """What makes network input of them where nobody says more: images to 0..1, the rest as it is.

        Tokens are int64 then, whatever type they are stored in.
        """
        return InputTransform.unit(self.shape[0]) if self.are_images else InputTransform.identity()


@dataclass(frozen=True)
class InputTransform:
    """Turns a stored batch into network input: `prepare(x)` is `(x / 255 - mean) / std`, per channel.

    Without constants it is the identity, for floats and tokens that are network input already.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(0 < s < float("inf") for s in self.std):
            raise InputError(
                f"cannot normalise by mean {self.mean} and std {self.std}; expected one mean and one "
                "positive std for each channel."
            )

    @staticmethod
    def identity() -> "InputTransform":
        return InputTransform()

    @staticmethod
    def unit(channels: int) -> "InputTransform":
        """Scales images to 0..1 and no further."""
        return InputTransform((0.0,) * channels, (1.0,) * channels)

    def __call__(self, x: Tensor, channels_last: bool = False) -> Tensor:
        """The batch as float32, images as N x C x H x W in the memory format asked for; tokens as int64.

        The identity gives the batch itself where nothing has to change; do not write to it.
        """
        layout = torch.channels_last if channels_last and x.ndim == 4 else torch.contiguous_format
        if not self.mean:
            kind = torch.int64 if is_integer_target(x) else torch.float32
            return x.to(kind).contiguous(memory_format=layout)
        n, height, width, channels = self._check(x)
        if not channels_last:
            scale, shift = _constants(self, x.device, 1)
            planes = x.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout)
            return planes.mul_(scale.view(-1, 1, 1)).add_(shift.view(-1, 1, 1))
        # Broadcasting over an innermost dimension of 3 is eight times slower than over whole rows of pixels,
        # so the constants are repeated to the length of such a row.
        scale, shift = _constants(self, x.device, width)
        pixels = x.to(torch.float32, memory_format=torch.contiguous_format)
        pixels.view(n * height, width * channels).mul_(scale).add_(shift)
        return pixels.permute(0, 3, 1, 2)

    def _check(self, x: Tensor) -> tuple[int, int, int, int]:
        if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[3] != len(self.mean):
            raise InputError(
                f"cannot normalise a {str(x.dtype).removeprefix('torch.')} batch of shape {tuple(x.shape)}; "
                f"expected uint8 images, n x height x width x {len(self.mean)}."
            )
        return x.shape[0], x.shape[1], x.shape[2], x.shape[3]


def is_integer_target(x: Tensor) -> bool:
    """Whether a tensor holds integers; truth values are none."""
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


@lru_cache(maxsize=64)
def _constants(prepare: InputTransform, device: torch.device, repeat: int) -> tuple[Tensor, Tensor]:
    """Scale and shift of every channel, on that device, repeated for `repeat` pixels."""
    mean, std = (torch.tensor(v, dtype=torch.float64, device="cpu").repeat(repeat) for v in (prepare.mean, prepare.std))
    return (1 / (255 * std)).to(device, torch.float32), (-mean / std).to(device, torch.float32)
