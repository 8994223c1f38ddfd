"""Some of a data set's classes: to pretrain on half of them and federate the rest."""

import re
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.content import Dataset
from fedloom.data.samples import Samples
from fedloom.errors import InputError


def keep_classes(dataset: Dataset, spec: str | None) -> Dataset:
    """The samples of the classes that `spec` names, such as `0-4` or `0,2,7-9`; None keeps all.

    Labels count from 0 again, in the order of the classes in the data set, and the class names follow.
    """
    if spec is None:
        return dataset
    kept = parse_classes(spec, dataset.classes, dataset.name)
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


def parse_classes(spec: str, count: int, name: str) -> list[int]:
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
