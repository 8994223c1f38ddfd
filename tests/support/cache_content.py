"""A data set that uses every field, for tests of the cache."""

import numpy as np
import torch

from fedloom.data.cache import MARKS
from fedloom.data.dataset import NO_OWNER, Dataset
from fedloom.data.samples import Samples


def content(seed: int = 0, n: int = 40) -> Dataset:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8), rng.integers(0, 3, n)
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y))
    owners = rng.integers(0, 2, n - 10)
    return Dataset(
        samples[:-10],
        samples[-10:],
        ("a", "b", "ç"),
        owners,
        ("me", "you"),
        np.zeros(n - 10, np.int64),
        ("here",),
        test_owners=rng.integers(NO_OWNER, 2, 10),
        test_domains=np.zeros(10, np.int64),
    )


def same(one: Dataset, other: Dataset) -> bool:
    parts = [(one.train, other.train), (one.test, other.test)]
    samples = all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in parts)
    marks = all(np.array_equal(getattr(one, mark), getattr(other, mark)) for mark in MARKS)
    names = ("class_names", "owner_names", "domain_names")
    return samples and marks and all(getattr(one, name) == getattr(other, name) for name in names)
