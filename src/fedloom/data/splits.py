"""Data on the server: samples that no client holds, or another data set.

Written `split:0.05` (a share of the training samples), `split:500` (so many of them), or as the name of a data set.

Test samples from the clients themselves: each holds a share of its own out, and all are tested on together.

The authors of LSS do so: they merge the training and the test samples of a data set, spread them over the clients, and
cut each client's part in two. A client then is tested on its own mixture of classes, or its own domain.

Some of a data set's classes: to pretrain on half of them and federate the rest.
"""

import copy
import math
import re
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
"""What is taken where a method needs data on the server and nobody says which."""
OWN = "own"
"""Said of samples that a user's own federation brings along."""
NO_INDICES: Indices = np.arange(0)


@dataclass(frozen=True)
class ServerDataSplit:
    """What the server holds, and where it comes from."""

    samples: Samples
    source: str
    """As it is written: `split:0.05`, `own`, or the name of a data set."""
    classes: int
    """How many classes its labels tell apart; 0 where they are not classes."""

    def sentence(self, users: tuple[str, ...]) -> str:
        """What a person should know about it, given the methods that use it."""
        used = f"used by {' and '.join(users)}" if users else "which no method here uses"
        whose = "samples that no client holds" if is_split_spec(self.source) else "samples"
        return f"The server holds {len(self.samples)} {whose} (--server-data {self.source}), {used}."


def is_split_spec(spec: str | None) -> bool:
    """Whether the server's data are part of the training samples."""
    return spec is not None and spec.strip().partition(":")[0] == "split"


def draw_server_split(spec: str | None, count: int, rng: Rng) -> Indices:
    """Sorted positions of the samples, of `count`, that the server keeps; none unless `spec` is a split."""
    if spec is None or not is_split_spec(spec):
        return NO_INDICES
    taken = _size(spec, count)
    if not 0 < taken < count:
        left = "so nothing would be left for the clients" if taken else "which is none"
        raise InputError(f"server_data {spec!r} takes {taken} of {count} training samples, {left}.")
    return np.sort(rng.choice(count, taken, replace=False)).astype(np.int64)


def _size(spec: str, count: int) -> int:
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
    return int(share * count + 0.5)


def take_server_split(federation: FederatedDataset, spec: str, rng: Rng) -> tuple[FederatedDataset, ServerDataSplit]:
    """What the server holds of a user's own federation, and the federation without it."""
    name = federation.name
    if not is_split_spec(spec):
        if federation.server_data is None:
            raise InputError(
                f"server_data is {OWN!r}, but the data {name!r} bring none: set `server_data` of the federation."
            )
        return federation, _fitting(federation, ServerDataSplit(federation.server_data, spec, federation.classes))
    if not isinstance(federation, PartitionedDataset):
        raise InputError(
            f"the data {name!r} are spread over their clients already, so {spec!r} cannot be taken from them; set "
            "`server_data` of the federation, or name a data set."
        )
    held = draw_server_split(spec, len(federation.pool), rng)
    lighter = copy.copy(federation)
    lighter.parts = [part[~np.isin(part, held)] for part in federation.parts]
    return lighter, ServerDataSplit(federation.pool.take(held), spec, federation.classes)


def load_server_split(federation: FederatedDataset, spec: str, load: Callable[[str], Dataset]) -> ServerDataSplit:
    """The training samples of the data set `spec`, which must look like those of the federation."""
    if spec == federation.name:
        raise InputError(f"server_data {spec!r} is what the clients hold; expected another data set, or {DEFAULT}.")
    other = load(spec)
    return _fitting(federation, ServerDataSplit(other.train, spec, other.classes))


def _fitting(federation: FederatedDataset, held: ServerDataSplit) -> ServerDataSplit:
    mine, theirs = held.samples, _example(federation)
    if not len(mine):
        raise InputError(f"server_data {held.source!r} holds no samples.")
    alike = theirs is None or (mine.are_images, mine.are_tokens) == (theirs.are_images, theirs.are_tokens)
    if mine.shape != federation.shape or not alike:
        raise InputError(
            f"server_data {held.source!r} has inputs of {_kind(mine)} {_by(mine.shape)}, but those of "
            f"{federation.name!r} are {_kind(theirs or mine)} {_by(federation.shape)}."
        )
    if mine.are_tokens and federation.tokens and (largest := int(mine.x.max())) >= federation.tokens:
        raise InputError(
            f"server_data {held.source!r} has the token {largest}, but {federation.name!r} has {federation.tokens}."
        )
    return held


def _example(federation: FederatedDataset) -> Samples | None:
    if isinstance(federation, PartitionedDataset):
        return federation.pool
    return federation.test if federation.test is not None else federation.client(0)


def _kind(samples: Samples) -> str:
    return "images" if samples.are_images else "tokens" if samples.are_tokens else "numbers"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


Marks = NDArray[np.int64]
"""Whose each sample is, or where it comes from."""


def merge_train_and_test(dataset: Dataset) -> Dataset:
    """All samples for training and none for testing.

    Where it is known whose the training samples are, or where they come from, but not of all test samples, these are
    left out.
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


def split_client_tests(federation: PartitionedDataset, share: float, rng: np.random.Generator) -> PartitionedDataset:
    """The same clients, each with a share of its samples held out; the test set is these, client after client.

    A client keeps one sample to train on.
    """
    parts, held = [], []
    for part in federation.parts:
        order = rng.permutation(part)
        count = min(int(share * len(part) + 0.5), max(0, len(part) - 1))
        held.append(np.sort(order[:count]))
        parts.append(np.sort(order[count:]))
    test = np.concatenate(held) if held else np.zeros(0, dtype=np.int64)
    if not len(test):
        raise InputError(f"no client has enough samples to hold a share of {share} out for testing.")
    divided = PartitionedDataset(
        federation.pool,
        parts,
        classes=federation.classes,
        shape=federation.shape,
        prepare=federation.prepare,
        test=federation.pool.take(test),
        name=federation.name,
        tokens=federation.tokens,
    )
    divided.test_owners = np.repeat(np.arange(len(held)), [len(part) for part in held])
    return divided


def select_classes(dataset: Dataset, spec: str | None) -> Dataset:
    """The samples of the classes that `spec` names, such as `0-4` or `0,2,7-9`; None keeps all.

    Labels count from 0 again, in the order of the classes in the data set, and the class names follow.
    """
    if spec is None:
        return dataset
    kept = _parse_classes(spec, dataset.classes, dataset.name)
    new_label = torch.full((dataset.classes,), -1)
    new_label[kept] = torch.arange(len(kept))

    def part(samples: Samples) -> Samples:
        labels = new_label[samples.y]
        index = torch.nonzero(labels >= 0).flatten()
        return Samples(samples.x.index_select(0, index), labels[index])

    def marks(values: NDArray[np.int64] | None, samples: Samples) -> NDArray[np.int64] | None:
        return None if values is None else values[np.isin(samples.y.numpy(), kept)]

    return replace(
        dataset,
        train=part(dataset.train),
        test=part(dataset.test),
        class_names=tuple(dataset.class_names[label] for label in kept),
        owners=marks(dataset.owners, dataset.train),
        domains=marks(dataset.domains, dataset.train),
        test_owners=marks(dataset.test_owners, dataset.test),
        test_domains=marks(dataset.test_domains, dataset.test),
    )


def _parse_classes(spec: str, count: int, name: str) -> list[int]:
    """The classes that `spec` names, in order, of a data set `name` with `count` of them."""
    kept: list[int] = []
    for piece in spec.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", piece, flags=re.ASCII)
        if found is None:
            raise InputError(f"classes are given as 0-4 or 0,1,2, not {spec!r}.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InputError(f"the classes {piece.strip()!r} run backwards; write {last}-{first}.")
        if last >= count:
            raise InputError(f"{name!r} has the classes 0 to {count - 1}, so there is no class {last}.")
        kept += range(first, last + 1)
    if len(set(kept)) < len(kept):
        raise InputError(f"the classes {spec!r} name class {next(c for c in kept if kept.count(c) > 1)} twice.")
    if len(kept) < 2:
        raise InputError(f"the classes {spec!r} are only one; there must be two to tell apart.")
    return sorted(kept)
