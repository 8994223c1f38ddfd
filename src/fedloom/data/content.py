"""A data set in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedloom.data.samples import Prepare, Samples
from fedloom.errors import InputError

NOBODY = -1
"""The owner of a sample that is nobody's, or left out."""


@dataclass(frozen=True)
class Dataset:
    """Training and test samples, and where it is known whose each sample is and where it comes from.

    `owners` and `domains` give for each training sample a position in `owner_names` and `domain_names`, and
    `test_owners` and `test_domains` for each test sample; there NOBODY is somebody without training samples.
    """

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
    """Empty where the task is no classification."""
    owners: NDArray[np.int64] | None = None
    owner_names: tuple[str, ...] = ()
    domains: NDArray[np.int64] | None = None
    domain_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a person should know about how it was read, a sentence each."""
    tokens: int = 0
    """Where inputs are tokens: how many different ones there may be; 0 where nobody says."""
    test_owners: NDArray[np.int64] | None = None
    test_domains: NDArray[np.int64] | None = None
    name: str = ""
    """What it is called; a reader leaves it to `load`."""
    prepare: Prepare = field(default_factory=Prepare.identity)
    """Makes network input of shape `shape` from stored samples; images without constants are scaled to 0..1."""

    def __post_init__(self) -> None:
        if self.train.are_images and not self.prepare.mean:
            object.__setattr__(self, "prepare", self.train.default_prepare())
        training, testing = (len(self.train), "training", 0), (len(self.test), "test", NOBODY)
        for (count, part, least), what, values, names in (
            (training, "owners", self.owners, self.owner_names),
            (training, "domains", self.domains, self.domain_names),
            (testing, "owners", self.test_owners, self.owner_names),
            (testing, "domains", self.test_domains, self.domain_names),
        ):
            if values is None:
                continue
            if values.shape != (count,):
                raise InputError(f"{count} {part} samples have {what} of shape {values.shape}.")
            if len(values) and (values.min() < least or values.max() >= len(names)):
                raise InputError(f"{what} run from {values.min()} to {values.max()}, but {len(names)} have a name.")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.shape


def positions(of: Sequence[str | None], names: Sequence[str]) -> NDArray[np.int64]:
    """Where each of these owners stands in `names`; NOBODY for one who does not."""
    at = {name: position for position, name in enumerate(names)}
    return np.array([NOBODY if name is None else at.get(name, NOBODY) for name in of], dtype=np.int64)
