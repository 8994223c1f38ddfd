"""Tests of federated data from a pool, arrays, data sets, and a user's class."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from fedloom.data import FederatedDataset, InputTransform, PartitionedDataset, Samples
from fedloom.errors import InputError


class Million(FederatedDataset):
    """Clients that make their samples when asked."""

    classes = 3
    shape = (4,)

    def __len__(self) -> int:
        return 1_000_000

    def client_samples(self, client_id: int) -> Samples:
        generator = torch.Generator().manual_seed(client_id)
        return Samples(torch.randn(5, 4, generator=generator), torch.arange(5) % 3)


def test_a_subclass_needs_no_more_than_four_things() -> None:
    federation = Million()
    assert (len(federation), federation.name, federation.test) == (1_000_000, "Million", None)
    assert federation.num_examples(999_999) == 5
    assert federation.label_counts() is None
    x = federation.client_samples(7).x
    assert torch.equal(federation.transform(x), x)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_a_pool_gives_each_client_its_own(owners: list[int]) -> None:
    owner = np.array(owners)
    pool = Samples(torch.arange(len(owner)).float().unsqueeze(1), torch.arange(len(owner)) % 3)
    federation = PartitionedDataset(pool, [np.flatnonzero(owner == k) for k in range(5)], classes=3)
    counts = federation.label_counts()
    assert counts is not None
    assert counts.shape == (5, 3)
    for k in range(5):
        held = federation.client_samples(k)
        assert held.x.flatten().tolist() == np.flatnonzero(owner == k).tolist()
        assert federation.num_examples(k) == len(held) == counts[k].sum()
        assert counts[k].tolist() == [int((held.y == c).sum()) for c in range(3)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [4]], "client 1 holds positions from 4 to 4; the pool has 4"),
        ([[-1, 0]], "client 0 holds positions from -1 to 0"),
        ([[0, 1], [1, 2]], "client 1 holds a sample that is already held"),
        ([[2, 2]], "client 0 holds a sample that is already held"),
    ],
)
def test_a_pool_refuses_wrong_parts(parts: list[list[int]], message: str) -> None:
    pool = Samples(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match=message):
        PartitionedDataset(pool, [np.array(part) for part in parts], classes=2)


def test_a_pool_refuses_labels_beyond_its_classes() -> None:
    pool = Samples(torch.zeros(4, 2), torch.arange(4))
    with pytest.raises(InputError, match="labels from 0 to 3; expected labels from 0 to 2"):
        PartitionedDataset(pool, [np.arange(4)], classes=3)


def test_label_counts_stop_at_two_thousand_clients() -> None:
    pool = Samples(torch.zeros(2001, 1), torch.zeros(2001, dtype=torch.int64))
    parts = [np.array([k]) for k in range(2001)]
    assert PartitionedDataset(pool, parts, classes=1).label_counts() is None
    assert PartitionedDataset(pool, parts[:2000], classes=1).label_counts() is not None


def test_arrays_of_numpy_and_torch_together() -> None:
    frozen = np.arange(6, dtype=np.float64).reshape(3, 2)[::-1]
    frozen.setflags(write=False)
    clients = [
        (np.array([]), np.array([])),
        (frozen, np.array([0, 2, 1], np.uint8)),
        (torch.ones(1, 2), torch.tensor([4])),
    ]
    federation = FederatedDataset.from_arrays(clients, test=(np.zeros((2, 2)), [1, 3]))
    assert [federation.num_examples(k) for k in range(3)] == [0, 3, 1]
    assert (federation.classes, federation.shape, federation.name) == (5, (2,), "own")
    assert federation.client_samples(0).x.shape == (0, 2)
    assert federation.client_samples(1).x.tolist() == [[4, 5], [2, 3], [0, 1]]
    assert federation.client_samples(1).x.dtype == torch.float32
    assert federation.client_samples(1).y.dtype == federation.client_samples(0).y.dtype == torch.int64
    counts = federation.label_counts()
    assert counts is not None
    assert counts.tolist() == [[0] * 5, [1, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert federation.test is not None
    assert federation.test.y.tolist() == [1, 3]


def test_arrays_of_images_are_scaled() -> None:
    x = np.full((2, 5, 4, 3), 255, np.uint8)
    federation = FederatedDataset.from_arrays([(x, np.array([0, 1]))])
    assert federation.shape == (3, 5, 4)
    assert torch.equal(federation.transform(federation.client_samples(0).x), torch.ones(2, 3, 5, 4))
    own = InputTransform((0.5,) * 3, (0.5,) * 3)
    assert FederatedDataset.from_arrays([(x, np.array([0, 1]))], transform=own).transform is own


def test_float_labels_make_a_regression() -> None:
    federation = FederatedDataset.from_arrays([(np.zeros((2, 3)), np.array([0.5, 1.5]))])
    assert federation.classes == 0
    assert federation.client_samples(0).y.dtype == torch.float32
    assert federation.label_counts() is None


GOOD = (np.zeros((2, 3)), np.array([0, 1]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((np.array([[0, np.nan, 1]]), np.array([0])), "client 1 has inputs that are NaN"),
        ((np.array([[0, np.inf, 1]]), np.array([0])), "client 1 has inputs that are NaN or infinite"),
        ((np.zeros((2, 3)), np.array([0])), r"client 1: .*\(2, 3\)"),
        ((np.zeros((2, 4)), np.array([0, 1])), r"client 1 has inputs .*\(4,\); expected .*\(3,\)"),
        ((np.zeros((2, 3)), np.array([0.0, 1.0])), "client 1 has labels of type torch.float32"),
        ((np.zeros((2, 3)), np.array([0, -2])), "client 1 has the label -2"),
        (
            (np.array([["a", "b", "c"]]), np.array([0])),
            "client 1 has values that are not an array of numbers",
        ),
        ((np.zeros((1, 3), complex), np.array([0])), "client 1 has complex values"),
    ],
)
def test_arrays_that_cannot_be_used(bad: tuple[np.ndarray, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FederatedDataset.from_arrays([GOOD, bad])
    with pytest.raises(InputError, match=message.replace("client 1", "the test set")):
        FederatedDataset.from_arrays([GOOD], test=bad)


def test_clients_are_pairs() -> None:
    x, y = np.zeros((3, 4)), np.zeros(3, int)
    with pytest.raises(InputError, match=r"^client 0 is a ndarray; expected a pair \(x, y\)"):
        FederatedDataset.from_arrays((x, y))  # type: ignore[arg-type]  # one pair in place of a list of them
    with pytest.raises(InputError, match="the test set is a ndarray; expected a pair"):
        FederatedDataset.from_arrays([(x, y)], test=x)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [-2, "3", 2.5])
def test_classes_are_counted(classes: Any) -> None:
    with pytest.raises(InputError, match=f"classes must be a whole number, 0 or more, not {classes!r}"):
        FederatedDataset.from_arrays([(np.zeros((2, 4)), np.array([0, 1]))], classes=classes)


def test_labels_that_are_no_classes_are_not_believed() -> None:
    clients = [(np.zeros((3, 4)), np.array([0, 1, 10**12]))]
    with pytest.raises(InputError, match="the largest label is 1000000000000, so there would be 1,000,000,000,001 cl"):
        FederatedDataset.from_arrays(clients)
    assert FederatedDataset.from_arrays(clients, classes=10**12 + 1).classes == 10**12 + 1


def test_labels_must_fit_the_classes_given() -> None:
    with pytest.raises(InputError, match="client 1 has the label 5; expected labels from 0 to 3"):
        FederatedDataset.from_arrays([GOOD, (np.zeros((1, 3)), np.array([5]))], classes=4)
    with pytest.raises(InputError, match="expected integers from 0 to 3"):
        FederatedDataset.from_arrays([(np.zeros((1, 3)), np.array([0.5]))], classes=4)


@pytest.mark.parametrize("clients", [[], [(np.zeros((0, 3)), np.array([]))]])
def test_somebody_must_hold_something(clients: list[tuple[np.ndarray, np.ndarray]]) -> None:
    with pytest.raises(InputError, match="no samples; expected at least one"):
        FederatedDataset.from_arrays(clients)


class Counting(Dataset):
    """Items that count how often they are read."""

    def __init__(self, n: int, label: int) -> None:
        self.n, self.label, self.reads = n, label, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        return np.full((2, 2), i, np.float32), self.label


def test_datasets_are_read_when_wanted() -> None:
    sets = [Counting(0, 0), Counting(3, 1), Counting(4, 2)]
    federation = FederatedDataset.from_datasets(sets, classes=3)
    assert [federation.num_examples(k) for k in range(3)] == [0, 3, 4]
    assert (federation.shape, sets[2].reads) == ((2, 2), 0)
    assert federation.label_counts() is None
    assert federation.client_samples(2).x[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert federation.client_samples(2).y.tolist() == [2] * 4
    assert sets[2].reads == 4
    assert len(federation.client_samples(0)) == 0


def test_datasets_can_be_read_anew() -> None:
    sets = [Counting(3, 1)]
    federation = FederatedDataset.from_datasets(sets, classes=3, keep_in_memory=False)
    before = sets[0].reads
    federation.client_samples(0), federation.client_samples(0)
    assert sets[0].reads == before + 6


def test_datasets_tell_their_classes() -> None:
    sets = [TensorDataset(torch.zeros(2, 3), torch.tensor([0, k])) for k in (1, 4)]
    federation = FederatedDataset.from_datasets(sets, test=sets[0])
    assert federation.classes == 5
    counts = federation.label_counts()
    assert counts is not None
    assert counts.tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 1]]
    assert federation.test is not None
    assert federation.test.y.tolist() == [0, 1]


class Stream(Dataset):
    """Has no length."""


class Ragged(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1 + i), 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "client 0 is a Stream without a length"),
        (TensorDataset(torch.zeros(2, 3)), r"client 0 has items that are not pairs; expected \(x, y\)"),
        (Ragged(), "client 0 has items of different shapes"),
        (Counting(2, 7), "client 0 has the label 7; expected labels from 0 to 2"),
    ],
)
def test_datasets_that_cannot_be_used(data: Dataset, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FederatedDataset.from_datasets([data], classes=3).client_samples(0)
