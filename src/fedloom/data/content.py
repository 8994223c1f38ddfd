"""What the files of a data set hold, before anyone says how it is normalised."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.samples import Samples
from fedloom.errors import InputError

NOBODY = -1
"""The owner of a sample that is nobody's, or left out."""


@dataclass(frozen=True)
class Content:
    """Training and test samples, and where it is known whose each sample is and where it comes from.

    `owners` and `domains` give for each training sample a position in `owner_names` and `domain_names`, and
    `test_owners` and `test_domains` for each test sample; there NOBODY is somebody without training samples.
    """

    train: Samples
    test: Samples
    class_names: tuple[str, ...]
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

    def __post_init__(self) -> None:
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


def positions(of: Sequence[str | None], names: Sequence[str]) -> NDArray[np.int64]:
    """Where each of these owners stands in `names`; NOBODY for one who does not."""
    at = {name: position for position, name in enumerate(names)}
    return np.array([NOBODY if name is None else at.get(name, NOBODY) for name in of], dtype=np.int64)
