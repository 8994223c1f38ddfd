"""What a scheme is given, and the checks that all schemes share."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedloom.data.dataset import NO_OWNER, Dataset
from fedloom.errors import InputError

Indices = NDArray[np.int64]
Labels = NDArray[np.generic]
Rng = np.random.Generator


@dataclass(frozen=True)
class PartitionPool:
    """What is known about the samples to share: their labels and, where the data say so, whose and whence they are."""

    labels: Labels
    owners: Indices | None = None
    owner_names: tuple[str, ...] = ()
    domains: Indices | None = None
    domain_names: tuple[str, ...] = ()
    name: str = "own"

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Indices) -> "PartitionPool":
        """What is known about the samples at these positions."""
        owners, domains = (None if whose is None else whose[index] for whose in (self.owners, self.domains))
        return replace(self, labels=self.labels[index], owners=owners, domains=domains)


@dataclass
class PartitionRequest:
    """A partition as it was asked for: `name:value,option=...` of a pool among `asked` clients."""

    name: str
    value: str
    options: dict[str, str]
    pool: PartitionPool
    asked: int | None
    """How many clients; None where the scheme is to say it."""
    rng: Rng
    read: set[str] = field(default_factory=set)

    @property
    def clients(self) -> int:
        """How many clients, for a scheme that cannot say it by itself."""
        if self.asked is None:
            raise InputError(f"partition {self.name!r} wants to be told the number of clients.")
        return self.asked

    def option(self, name: str, default: str) -> str:
        """The text of an option; what no scheme has read is refused at the end."""
        self.read.add(name)
        return self.options.get(name, default)

    def refuse_unread(self) -> None:
        for name in self.options:
            if name not in self.read:
                raise InputError(f"partition {self.name!r} has no option {name!r}.")

    def no_value(self) -> None:
        if self.value:
            raise InputError(f"partition {self.name!r} takes no value; {self.value!r} was given.")

    def whole(self, example: str) -> int:
        """The value as a whole number of at least 1."""
        return parse_integer_option(self.value, self.name, 1, example)

    def least(self, default: int) -> int:
        """The option `min`: how many samples a client has at least."""
        return parse_integer_option(self.option("min", str(default)), "min", 0, "min=10")

    def alpha(self) -> float:
        """The value as the parameter of a Dirichlet distribution."""
        try:
            alpha = float(self.value)
        except ValueError:
            alpha = math.nan
        if not 0 < alpha < math.inf:
            raise InputError(
                f"the alpha of {self.name!r} is {self.value!r}; expected a number above 0, as in {self.name}:0.1."
            )
        return alpha

    def classes(self) -> Indices:
        """The class of each sample, counted from 0 without gaps."""
        if not np.issubdtype(self.pool.labels.dtype, np.integer) or self.pool.labels.ndim != 1:
            kind = f"{self.pool.labels.dtype}{' rows' if self.pool.labels.ndim > 1 else ''}"
            raise InputError(f"partition {self.name!r} wants integer labels; these are {kind}.")
        return np.unique(self.pool.labels, return_inverse=True)[1].astype(np.int64)

    def enough(self, least: int) -> None:
        """Refuse a minimum that the samples cannot meet however they are shared."""
        if least * self.clients > len(self.pool):
            raise InputError(
                f"cannot give {self.clients} clients {least} samples each out of {len(self.pool)}; ask for fewer "
                "clients or a smaller min."
            )


def parse_integer_option(text: str, what: str, least: int, example: str) -> int:
    """A whole number of at least `least`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{what} is {text!r}; expected a whole number of at least {least}, as in {example}.")
    return number


def partition_from_assignment(owner: Indices, clients: int) -> list[Indices]:
    """The sorted positions of each client's samples, from the owner of each; those of NOBODY are left out."""
    order = np.argsort(owner, kind="stable").astype(np.int64)
    order = order[np.count_nonzero(owner == NO_OWNER) :]
    sizes = np.bincount(owner[order], minlength=clients)
    return np.split(order, np.cumsum(sizes)[:-1])


def make_partition_pool(dataset: Dataset) -> PartitionPool:
    """What partitions must know about the training samples of a data set."""
    labels = dataset.train.y.numpy()
    owners, domains = (dataset.owners, dataset.owner_names), (dataset.domains, dataset.domain_names)
    return PartitionPool(labels, *owners, *domains, name=dataset.name)
