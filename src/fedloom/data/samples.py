"""Stored samples, and the transform that turns a stored batch into network input."""

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
    """Inputs `x` and labels `y` with one row per sample.

    Images are uint8 of shape n x H x W x C: this takes a quarter of the memory of floats, and channels-last network
    input is a view of it. Other integers are tokens, stored in any integer type. All other inputs are float32 in the
    shape that the network takes. Labels are int64, or float for a regression.

    Raises:
        InputError: If `x` and `y` differ in length.

    Example:
        Samples(torch.zeros(8, 28, 28, 1, dtype=torch.uint8), torch.arange(8))  # eight gray images and their labels
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
        """Return a copy of some samples.

        Args:
            index: The positions of the samples, in the order of the result.
        """
        at = torch.as_tensor(index, dtype=torch.int64, device=self.x.device)
        return Samples(self.x.index_select(0, at), self.y.index_select(0, at))

    def __getitem__(self, part: slice) -> "Samples":
        """Return a slice of the samples as a view."""
        return Samples(self.x[part], self.y[part])

    @property
    def are_images(self) -> bool:
        return self.x.dtype == torch.uint8 and self.x.ndim == 4

    @property
    def are_tokens(self) -> bool:
        """Whether inputs are IDs of characters, words or the like."""
        return samples_are_integer(self.x) and not self.are_images

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one network input: C x H x W for images, else that of a stored row."""
        row = tuple(self.x.shape[1:])
        return (row[2], row[0], row[1]) if self.are_images else row

    def default_transform(self) -> "InputTransform":
        """Return the default transform: scale images to 0..1, convert tokens to int64, keep other inputs."""
        return InputTransform.unit(self.shape[0]) if self.are_images else InputTransform.identity()


@dataclass(frozen=True)
class InputTransform:
    """Turns a stored batch into network input: images become `(x / 255 - mean) / std`, per channel.

    Without constants it is the identity, for tokens and for floats.

    Args:
        mean: Mean of each channel, of values from 0 to 1.
        std: Standard deviation of each channel.

    Raises:
        InputError: If there is not one positive `std` for each `mean`.

    Example:
        >>> import torch
        >>> transform = InputTransform((0.5,), (0.5,))
        >>> transform(torch.full((2, 28, 28, 1), 255, dtype=torch.uint8)).shape
        torch.Size([2, 1, 28, 28])
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(0 < s < float("inf") for s in self.std):
            raise InputError(
                f"cannot normalize by mean {self.mean} and std {self.std}; expected one mean and one "
                "positive std for each channel."
            )

    @staticmethod
    def identity() -> "InputTransform":
        """Return the transform that changes only the type: tokens become int64, other inputs float32."""
        return InputTransform()

    @staticmethod
    def unit(channels: int) -> "InputTransform":
        """Return the transform that scales images to 0..1.

        Args:
            channels: Number of channels of an image.
        """
        return InputTransform((0.0,) * channels, (1.0,) * channels)

    def __call__(self, x: Tensor, channels_last: bool = False) -> Tensor:
        """Transform a batch to float32, and tokens to int64; images get the shape N x C x H x W.

        If nothing has to change, the result is the stored batch itself, so do not write to it.
        """
        layout = torch.channels_last if channels_last and x.ndim == 4 else torch.contiguous_format
        if not self.mean:
            kind = torch.int64 if samples_are_integer(x) else torch.float32
            return x.to(kind).contiguous(memory_format=layout)
        n, height, width, channels = self._check(x)
        if not channels_last:
            scale, shift = _constants(self, x.device, 1)
            planes = x.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout)
            return planes.mul_(scale.view(-1, 1, 1)).add_(shift.view(-1, 1, 1))
        # Repeat the constants to the length of a row of pixels: broadcasting over an innermost dimension of 3 is
        # eight times slower.
        scale, shift = _constants(self, x.device, width)
        pixels = x.to(torch.float32, memory_format=torch.contiguous_format)
        pixels.view(n * height, width * channels).mul_(scale).add_(shift)
        return pixels.permute(0, 3, 1, 2)

    def _check(self, x: Tensor) -> tuple[int, int, int, int]:
        if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[3] != len(self.mean):
            raise InputError(
                f"cannot normalize a {str(x.dtype).removeprefix('torch.')} batch of shape {tuple(x.shape)}; "
                f"expected uint8 images, n x height x width x {len(self.mean)}."
            )
        return x.shape[0], x.shape[1], x.shape[2], x.shape[3]


def samples_are_integer(x: Tensor) -> bool:
    """Return whether a tensor holds integers (bool does not count)."""
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


@lru_cache(maxsize=64)
def _constants(transform: InputTransform, device: torch.device, repeat: int) -> tuple[Tensor, Tensor]:
    """Return scale and shift of every channel on a device, repeated for `repeat` pixels."""
    mean, std = (
        torch.tensor(v, dtype=torch.float64, device="cpu").repeat(repeat) for v in (transform.mean, transform.std)
    )
    return (1 / (255 * std)).to(device, torch.float32), (-mean / std).to(device, torch.float32)
