"""The request that a partition scheme gets, and the checks that all schemes share."""

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
    """Labels of the samples to partition, and their owners and domains if they are known."""

    labels: Labels
    owners: Indices | None = None
    owner_names: tuple[str, ...] = ()
    domains: Indices | None = None
    domain_names: tuple[str, ...] = ()
    name: str = "own"

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Indices) -> "PartitionPool":
        """Return the pool of the samples at these positions."""
        owners, domains = (None if whose is None else whose[index] for whose in (self.owners, self.domains))
        return replace(self, labels=self.labels[index], owners=owners, domains=domains)


@dataclass
class PartitionRequest:
    """A partition `name:value,option=...` of a pool among `requested_num_clients` clients."""

    name: str
    value: str
    options: dict[str, str]
    pool: PartitionPool
    requested_num_clients: int | None
    """Number of clients; None if the scheme determines it."""
    rng: Rng
    used_options: set[str] = field(default_factory=set)

    @property
    def num_clients(self) -> int:
        """Number of clients, for a scheme that cannot determine it."""
        if self.requested_num_clients is None:
            raise InputError(f"partition {self.name!r} needs the number of clients.")
        return self.requested_num_clients

    def option(self, name: str, default: str) -> str:
        """Return an option as text, and mark it as used."""
        self.used_options.add(name)
        return self.options.get(name, default)

    def refuse_unused_options(self) -> None:
        for name in self.options:
            if name not in self.used_options:
                raise InputError(f"partition {self.name!r} has no option {name!r}.")

    def refuse_value(self) -> None:
        if self.value:
            raise InputError(f"partition {self.name!r} takes no value; {self.value!r} was given.")

    def integer_value(self, example: str) -> int:
        """Return the value as a whole number of at least 1."""
        return parse_partition_integer(self.value, self.name, 1, example)

    def min_examples(self, default: int) -> int:
        """Return the option `min`, the least number of samples of a client."""
        return parse_partition_integer(self.option("min", str(default)), "min", 0, "min=10")

    def alpha(self) -> float:
        """Return the value as the parameter of a Dirichlet distribution."""
        try:
            alpha = float(self.value)
        except ValueError:
            alpha = math.nan
        if not 0 < alpha < math.inf:
            raise InputError(
                f"the alpha of {self.name!r} is {self.value!r}; expected a number above 0, as in {self.name}:0.1."
            )
        return alpha

    def class_indices(self) -> Indices:
        """Return the class of each sample, numbered from 0 without gaps."""
        if not np.issubdtype(self.pool.labels.dtype, np.integer) or self.pool.labels.ndim != 1:
            kind = f"{self.pool.labels.dtype}{' rows' if self.pool.labels.ndim > 1 else ''}"
            raise InputError(
                f"partition {self.name!r} wants integer labels; these are {kind}. For a regression use iid, quantity:A "
                "or natural."
            )
        return np.unique(self.pool.labels, return_inverse=True)[1].astype(np.int64)

    def check_min_examples(self, min_examples: int) -> None:
        """Raise `InputError` if there are too few samples to give each client `min_examples`."""
        if min_examples * self.num_clients > len(self.pool):
            raise InputError(
                f"cannot give {self.num_clients} clients {min_examples} samples each out of {len(self.pool)}; ask "
                "for fewer clients or a smaller min."
            )


def parse_partition_integer(text: str, name: str, minimum: int, example: str) -> int:
    """Parse a whole number of at least `minimum`."""
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise InputError(f"{name} is {text!r}; expected a whole number of at least {minimum}, as in {example}.")
    return number


def partition_from_assignment(assignment: Indices, num_clients: int) -> list[Indices]:
    """Return the sorted positions of each client's samples, given the client (or `NO_OWNER`) of each sample."""
    order = np.argsort(assignment, kind="stable").astype(np.int64)
    order = order[np.count_nonzero(assignment == NO_OWNER) :]
    sizes = np.bincount(assignment[order], minlength=num_clients)
    return np.split(order, np.cumsum(sizes)[:-1])


def make_partition_pool(dataset: Dataset) -> PartitionPool:
    """Return labels, owners and domains of the training samples of a data set."""
    labels = dataset.train.y.numpy()
    owners, domains = (dataset.owners, dataset.owner_names), (dataset.domains, dataset.domain_names)
    return PartitionPool(labels, *owners, *domains, name=dataset.name)
