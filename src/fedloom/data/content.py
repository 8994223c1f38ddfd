"""What the files of a data set hold, before anyone says how it is normalised."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.samples import Samples
from fedloom.errors import InputError


@dataclass(frozen=True)
class Content:
    """Training and test samples, and where it is known whose each training sample is and where it comes from.

    `owners` and `domains` give for each training sample a position in `owner_names` and `domain_names`.
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

    def __post_init__(self) -> None:
        for what, values, names in (
            ("owners", self.owners, self.owner_names),
            ("domains", self.domains, self.domain_names),
        ):
            if values is None:
                continue
            if values.shape != (len(self.train),):
                raise InputError(f"{len(self.train)} training samples have {what} of shape {values.shape}.")
            if len(values) and (values.min() < 0 or values.max() >= len(names)):
                raise InputError(f"{what} run from {values.min()} to {values.max()}, but {len(names)} have a name.")
