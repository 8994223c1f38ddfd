"""Tests that every sample has one owner and the skew is the requested one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import load_dataset
from fedloom.data.partitions import available_partitions, partition_dataset, partition_indices
from fedloom.data.partitions.base import PartitionPool
from fedloom.errors import InputError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(n: int, classes: int) -> np.ndarray:
    return rng(7).permutation(np.arange(n) % classes)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), classes=st.integers(1, 12))
def test_every_sample_has_exactly_one_owner(data: st.DataObject, seed: int, classes: int) -> None:
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=8, max_size=200))) * 3
    clients = data.draw(st.integers(1, len(labels) // 4))
    kinds = ["iid", "shards:1", "shards:4", "dirichlet:0.3,min=0", "dirichlet:5,min=0"]
    spec = data.draw(st.sampled_from([*kinds, "dirichlet-equal:0.01", "dirichlet-equal:2"]))
    parts = partition_indices(spec, labels, clients, rng(seed))
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    again = partition_indices(spec, labels, clients, rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if spec == "iid":
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    if spec.startswith("dirichlet-equal"):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= len(np.unique(labels))


@pytest.mark.parametrize("spec", ["iid", "shards:2", "dirichlet:1", "dirichlet-equal:1"])
def test_another_seed_gives_another_partition(spec: str) -> None:
    labels = balanced(600, 10)
    one, two = (partition_indices(spec, labels, 5, rng(seed)) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 20), each=st.integers(1, 5), seed=st.integers(0, 1000))
def test_a_client_of_shards_has_few_labels(clients: int, each: int, seed: int) -> None:
    labels = balanced(1000, 10)
    shard = 1000 / (clients * each)
    for part in partition_indices(f"shards:{each}", labels, clients, rng(seed)):
        assert abs(len(part) - each * shard) <= each
        # A shard covers as many labels as fit into it, and two more at its edges.
        assert len(np.unique(labels[part])) <= each * (shard // 100 + 2)


def test_shards_as_in_the_first_paper() -> None:
    labels = balanced(2000, 10)
    parts = partition_indices("shards:2", labels, 100, rng())
    assert {len(part) for part in parts} == {20}
    assert {len(np.unique(labels[part])) for part in parts} == {1, 2}


def test_every_client_of_dirichlet_has_the_minimum() -> None:
    labels = balanced(2000, 10)
    sizes = [[len(part) for part in partition_indices("dirichlet:0.3,min=25", labels, 20, rng(s))] for s in range(20)]
    assert min(map(min, sizes)) >= 25
    assert len({tuple(s) for s in sizes}) == 20
    default = [min(len(part) for part in partition_indices("dirichlet:0.3", labels, 20, rng(s))) for s in range(20)]
    assert 10 <= min(default) < 25


def test_smaller_alpha_gives_more_skew() -> None:
    labels = balanced(5000, 10)

    def largest_share(spec: str) -> float:
        parts = partition_indices(spec, labels, 10, rng())
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    shares = [largest_share(spec) for spec in ("dirichlet:0.1", "dirichlet:1", "dirichlet:100")]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.4
    assert shares[2] < 0.15


def test_no_client_gets_more_once_it_holds_its_even_share() -> None:
    # With classes of 100 and an even share of 500, nobody can pass 500 by more than one class.
    labels = balanced(5000, 50)
    for seed in range(10):
        assert max(len(part) for part in partition_indices("dirichlet:0.05,min=0", labels, 10, rng(seed))) < 600


@pytest.mark.parametrize("alpha", ["1e-320", "1e-300", "1e-20", "1e-5"])
def test_an_underflowing_draw_gives_whole_classes(alpha: str) -> None:
    labels = balanced(1000, 10)
    parts = partition_indices(f"dirichlet:{alpha},min=0", labels, 10, rng())
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert set(np.unique(counts)) <= {0, 100}
    assert counts.sum() == 1000


@pytest.mark.parametrize("alpha", ["1e12", "1e308"])
def test_an_overflowing_draw_gives_even_shares(alpha: str) -> None:
    labels = balanced(1000, 10)
    parts = partition_indices(f"dirichlet:{alpha}", labels, 10, rng())
    counts = np.stack([np.bincount(labels[part], minlength=10) for part in parts])
    assert abs(counts - 10).max() <= 1


def test_shares_of_an_unmasked_class_follow_dirichlet() -> None:
    # One class, two clients: the first one's share is Beta(2, 2), with mean 1/2 and variance 1/20.
    labels = np.zeros(1000, dtype=np.int64)
    shares = [len(partition_indices("dirichlet:2,min=0", labels, 2, rng(s))[0]) / 1000 for s in range(2000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.var(shares) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize(("alpha", "classes"), [("0.01", 1.5), ("0.04", 2.5), ("0.16", 4.9)])
def test_equal_clients_hold_as_many_classes_as_in_the_paper(alpha: str, classes: float) -> None:
    """80 clients of 50,000 samples: what the authors' own program gives (classes of more than 1 % of a client)."""
    labels = balanced(50_000, 10)
    held = []
    for seed in range(3):
        parts = partition_indices(f"dirichlet-equal:{alpha}", labels, 80, rng(seed))
        assert all(abs(len(part) - 625) <= 10 for part in parts)
        held += [np.sum(np.bincount(labels[part], minlength=10) > 0.01 * len(part)) for part in parts]
    assert np.mean(held) == pytest.approx(classes, abs=0.3)


@pytest.mark.parametrize("alpha", ["1e-320", "1e-300", "1e-9", "1e-3"])
def test_equal_clients_at_the_smallest_alpha_hold_single_classes(alpha: str) -> None:
    labels = balanced(4000, 10)
    parts = partition_indices(f"dirichlet-equal:{alpha}", labels, 40, rng())
    assert np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]) > 0.9
    assert max(map(len, parts)) - min(map(len, parts)) <= 10


@pytest.mark.parametrize("alpha", ["1e12", "1e308"])
def test_equal_clients_at_the_largest_alpha_are_all_alike(alpha: str) -> None:
    labels = balanced(1000, 10)
    counts = [
        np.bincount(labels[p], minlength=10) for p in partition_indices(f"dirichlet-equal:{alpha}", labels, 10, rng())
    ]
    assert abs(np.stack(counts) - 10).max() <= 1


def test_equal_clients_of_unequal_classes() -> None:
    labels = np.repeat(np.arange(4), [2000, 500, 30, 1])
    parts = partition_indices("dirichlet-equal:0.1", labels, 25, rng())
    sizes = [len(part) for part in parts]
    assert sum(sizes) == 2531
    assert max(sizes) - min(sizes) <= 4


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("dirichlet:0", 5, "alpha of 'dirichlet' is '0'"),
        ("dirichlet:-1", 5, "number above 0"),
        ("dirichlet:nan", 5, "number above 0"),
        ("dirichlet:inf", 5, "number above 0"),
        ("dirichlet:much", 5, "'much'"),
        ("dirichlet", 5, "as in dirichlet:0.1"),
        ("dirichlet-equal:0", 5, "alpha of 'dirichlet-equal' is '0'.*as in dirichlet-equal:0.1"),
        ("dirichlet-equal:-2", 5, "number above 0"),
        ("dirichlet-equal:nan", 5, "number above 0"),
        ("dirichlet-equal:1,min=3", 5, "no option 'min'"),
        ("dirichlet:1,min=-1", 5, "min is '-1'"),
        ("dirichlet:1,least=3", 5, "no option 'least'"),
        ("dirichlet:1,min", 5, "cannot read 'min'"),
        ("dirichlet:1,min=100", 5, "5 clients 100 samples each out of 300"),
        ("dirichlet:0.001", 20, r"20 clients 10 of the 300 samples .* at best.*larger alpha"),
        ("shards:0", 5, "shards is '0'"),
        ("shards:1.5", 5, "'1.5'"),
        ("shards", 5, "as in shards:2"),
        ("shards:100", 5, "300 samples into 5 x 100 shards"),
        ("iid:3", 5, "takes no value"),
        ("iid", 301, "300 samples among 301 clients"),
        ("iid", 0, "among 0 clients"),
        ("dirchlet:1", 5, "did you mean 'dirichlet'"),
    ],
)
def test_impossible_requests(spec: str, clients: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition_indices(spec, balanced(300, 10), clients, rng())


@pytest.mark.parametrize("spec", ["dirichlet:1", "dirichlet-equal:1"])
def test_dirichlet_wants_integer_labels(spec: str) -> None:
    with pytest.raises(InputError, match="integer labels"):
        partition_indices(spec, np.linspace(0, 1, 100), 2, rng())


def test_the_catalogue_lists_what_partition_knows(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text("[[0, 1], [2], [5]]")
    pool = PartitionPool(balanced(300, 10), owners=np.arange(300) % 3, domains=np.arange(300) % 3)
    values = {":A": ":1", ":S": ":2", ":K": ":2", ":PATH": f":{tmp_path / 'split.json'}"}
    assert len(available_partitions()) == 11
    for info in available_partitions():
        spec = info.spec.split("[")[0]
        for letter, value in values.items():
            spec = spec.replace(letter, value) if spec.endswith(letter) else spec
        assert len(partition_indices(spec, pool, 3, rng())) == 3


def test_build_shares_a_data_set() -> None:
    digits = load_dataset("digits")
    federation = partition_dataset(digits, "dirichlet:0.5", 10, rng())
    assert len(federation) == 10
    assert sum(federation.num_examples(k) for k in range(10)) == len(digits.train)
    assert (federation.name, federation.classes, federation.shape) == ("digits", 10, (1, 8, 8))
    assert federation.test is digits.test
    assert federation.transform(federation.client_samples(3).x).shape == (federation.num_examples(3), 1, 8, 8)
