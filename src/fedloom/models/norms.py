"""The norm layers that a network may be made with."""

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.models.base import Wanted
from fedloom.models.batch_norm import BatchNorm2d
from fedloom.settings import Settings

NormName = Literal["batch", "batch-stateless", "group", "instance", "none"]


class NormOptions(Settings):
    """Options of every network whose norm layers can be chosen."""

    norm: NormName = "batch"
    """batch, group, instance, none, or batch-stateless: batch norm by the batch at hand, in tests too"""
    groups: int = Field(2, ge=1)
    """groups of channels, where norm is group"""

    @model_validator(mode="after")
    def _groups_are_used(self) -> "NormOptions":
        if "groups" in self.model_fields_set and self.norm != "group":
            raise ValueError(f"groups is for norm=group, and norm is {self.norm!r}.")
        return self

    @property
    def biased(self) -> bool:
        """Whether a convolution beside a norm needs a bias of its own, because the norm brings none."""
        return self.norm == "none"

    def make(self, wanted: Wanted, channels: int, size: tuple[int, int]) -> nn.Module:
        """A norm for maps of this many channels and this size; the identity where norm is none."""
        if self.norm == "none":
            return nn.Identity()
        if self.norm == "batch":
            return BatchNorm2d(channels)
        if self.norm == "batch-stateless":
            return StatelessBatchNorm2d(channels)
        # One channel a group is instance norm without running statistics.
        groups = channels if self.norm == "instance" else self.groups
        if channels % groups:
            raise InputError(f"model {wanted.name!r} cannot share {channels} channels among {groups} groups.")
        if channels // groups * size[0] * size[1] == 1:
            pixels = f"{wanted.shape[1]} x {wanted.shape[2]} pixels"
            raise InputError(
                f"model {wanted.name!r} would normalise single numbers, for {pixels} shrink to one, and a number less "
                "its own mean is nothing; take larger images or another norm."
            )
        return nn.GroupNorm(groups, channels)


class StatelessBatchNorm2d(BatchNorm2d):
    """Batch norm without running statistics: always by the mean and variance of the batch at hand, also in a test.

    So a prediction depends on what else is in its batch, and there are no buffers to average. Where a channel has a
    single value in the whole batch (one sample, 1 x 1 pixel) torch refuses; here it is treated as any other: the value
    less its mean is 0, so the output is the bias, just as for a batch of copies of that sample.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.num_features:
            return (x - x) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return super().forward(x)
