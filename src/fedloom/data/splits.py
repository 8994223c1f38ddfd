"""Splits of a data set: server data and client test samples.

`server_data` is `split:0.05` (a share of the training samples), `split:500` (a number of them), or the name of another
data set.

Test samples per client follow the LSS paper: merge training and test samples, distribute them over the clients, and
hold out a part of each client's samples. Each client is then tested on its own classes, or on its own domain.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import NO_OWNER, Dataset
from fedloom.data.federated import FederatedDataset, PartitionedDataset
from fedloom.data.partitions.base import Indices, Rng
from fedloom.data.samples import Samples
from fedloom.errors import InputError

DEFAULT = "split:0.05"
"""The default for methods that need data on the server."""
OWN = "own"
"""The samples in `FederatedDataset.server_data`."""
NO_INDICES: Indices = np.arange(0)


@dataclass(frozen=True)
class ServerDataSplit:
    """The samples of the server, and where they come from."""

    samples: Samples
    source: str
    """The setting: `split:0.05`, `own`, or the name of a data set."""
    classes: int
    """Number of classes; 0 for a regression."""

    def describe(self, method_names: tuple[str, ...]) -> str:
        """Return a sentence for the user, given the names of the methods that use the data."""
        used = f"used by {' and '.join(method_names)}" if method_names else "which no method here uses"
        whose = "samples that no client holds" if is_split_spec(self.source) else "samples"
        return f"The server holds {len(self.samples)} {whose} (--server-data {self.source}), {used}."


def is_split_spec(spec: str | None) -> bool:
    """Return whether the server's data are part of the training samples."""
    return spec is not None and spec.strip().partition(":")[0] == "split"


def draw_server_split(spec: str | None, num_examples: int, rng: Rng) -> Indices:
    """Draw the positions of the server's samples, sorted; there are none unless `spec` is a split."""
    if spec is None or not is_split_spec(spec):
        return NO_INDICES
    taken = _size(spec, num_examples)
    if not 0 < taken < num_examples:
        left = "so nothing would be left for the clients" if taken else "which is none"
        raise InputError(f"server_data {spec!r} takes {taken} of {num_examples} training samples, {left}.")
    return np.sort(rng.choice(num_examples, taken, replace=False)).astype(np.int64)


def _size(spec: str, num_examples: int) -> int:
    text = spec.strip().partition(":")[2].strip()
    try:
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise InputError(
            f"server_data {spec!r} cannot be taken; expected a share between 0 and 1, such as {DEFAULT}, or a whole "
            "number of samples, such as split:500."
        )
    return int(share * num_examples + 0.5)


def take_server_split(
    federated_data: FederatedDataset, spec: str, rng: Rng, excluded: Indices = NO_INDICES
) -> tuple[FederatedDataset, ServerDataSplit]:
    """Split federated data into the clients' part and the server's part, which has no sample of `excluded`."""
    name = federated_data.name
    if not is_split_spec(spec):
        if federated_data.server_data is None:
            raise InputError(
                f"server_data is {OWN!r}, but the data {name!r} bring none: set `server_data` of the FederatedDataset."
            )
        return federated_data, _fitting(
            federated_data, ServerDataSplit(federated_data.server_data, spec, federated_data.classes)
        )
    if not isinstance(federated_data, PartitionedDataset):
        raise InputError(
            f"the data {name!r} are spread over their clients already, so {spec!r} cannot be taken from them; set "
            "`server_data` of the FederatedDataset, or name a data set."
        )
    offered = np.setdiff1d(np.arange(len(federated_data.pool)), excluded)
    held = offered[draw_server_split(spec, len(offered), rng)]
    lighter = copy.copy(federated_data)
    lighter.client_indices = [part[~np.isin(part, held)] for part in federated_data.client_indices]
    return lighter, ServerDataSplit(federated_data.pool.take(held), spec, federated_data.classes)


def split_server_data(
    federated_data: FederatedDataset, spec: str, load_dataset: Callable[[str], Dataset]
) -> ServerDataSplit:
    """Load the training samples of the data set `spec`; their inputs must be like those of the clients."""
    if spec == federated_data.name:
        raise InputError(f"server_data {spec!r} is what the clients hold; expected another data set, or {DEFAULT}.")
    other = load_dataset(spec)
    return _fitting(federated_data, ServerDataSplit(other.train, spec, other.classes))


def _fitting(federated_data: FederatedDataset, held: ServerDataSplit) -> ServerDataSplit:
    mine, theirs = held.samples, _example(federated_data)
    if not len(mine):
        raise InputError(f"server_data {held.source!r} holds no samples.")
    alike = theirs is None or (mine.are_images, mine.are_tokens) == (theirs.are_images, theirs.are_tokens)
    if mine.shape != federated_data.shape or not alike:
        raise InputError(
            f"server_data {held.source!r} has inputs of {_kind(mine)} {_by(mine.shape)}, but those of "
            f"{federated_data.name!r} are {_kind(theirs or mine)} {_by(federated_data.shape)}."
        )
    if (
        mine.are_tokens
        and federated_data.vocabulary_size
        and (largest := int(mine.x.max())) >= federated_data.vocabulary_size
    ):
        raise InputError(
            f"server_data {held.source!r} has the token {largest}, but {federated_data.name!r} has "
            f"{federated_data.vocabulary_size}."
        )
    return held


def _example(federated_data: FederatedDataset) -> Samples | None:
    if isinstance(federated_data, PartitionedDataset):
        return federated_data.pool
    return federated_data.test if federated_data.test is not None else federated_data.client_samples(0)


def _kind(samples: Samples) -> str:
    return "images" if samples.are_images else "tokens" if samples.are_tokens else "numbers"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


Marks = NDArray[np.int64]
"""The owner or the domain of each sample."""


def merge_train_and_test(dataset: Dataset) -> Dataset:
    """Return a data set with all samples for training and none for testing.

    If the training samples have owners or domains and some test samples do not, the test samples are left out.

    Args:
        dataset: The data set to merge; it is not changed.

    Returns:
        The merged data set. Its `notes` say if the test samples were left out.
    """
    owners, domains = (dataset.owners, dataset.test_owners), (dataset.domains, dataset.test_domains)
    merged = replace(dataset, test=dataset.test[:0], test_owners=None, test_domains=None)
    if not all(train is None or (test is not None and NO_OWNER not in test) for train, test in (owners, domains)):
        note = f"the {len(dataset.test)} test samples of {dataset.name!r} are left out: whose they are is not known."
        return replace(merged, notes=(*dataset.notes, note))
    both = (dataset.train, dataset.test)
    train = Samples(torch.cat([part.x for part in both]), torch.cat([part.y for part in both]))
    return replace(merged, train=train, owners=_joined(*owners), domains=_joined(*domains))


def _joined(train: Marks | None, test: Marks | None) -> Marks | None:
    return None if train is None or test is None else np.concatenate([train, test])


def split_client_tests(
    federated_data: PartitionedDataset, test_share: float, rng: np.random.Generator
) -> PartitionedDataset:
    """Hold out a share of each client's samples for testing.

    Args:
        federated_data: The clients and their samples; it is not changed.
        test_share: Share of each client's samples to hold out. A client keeps at least one sample for training.
        rng: Draws the samples that are held out.

    Returns:
        The same clients. `test` has the held-out samples, client after client, and `test_owners` their clients.

    Raises:
        InputError: If no client has enough samples.
    """
    parts, held = [], []
    for part in federated_data.client_indices:
        order = rng.permutation(part)
        count = min(int(test_share * len(part) + 0.5), max(0, len(part) - 1))
        held.append(np.sort(order[:count]))
        parts.append(np.sort(order[count:]))
    test = np.concatenate(held) if held else np.zeros(0, dtype=np.int64)
    if not len(test):
        raise InputError(f"no client has enough samples to hold a share of {test_share} out for testing.")
    divided = copy.copy(federated_data)
    divided.client_indices, divided.test = parts, federated_data.pool.take(test)
    divided.test_owners = np.repeat(np.arange(len(held)), [len(part) for part in held])
    return divided
