"""Tests that every partition scheme gives the promised sizes, classes and owners."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fedloom.data.partitions import available_partitions, dirichlet, partition_indices
from fedloom.data.partitions.base import PartitionPool
from fedloom.errors import InputError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(n: int, classes: int) -> np.ndarray:
    return rng(7).permutation(np.arange(n) % classes)


def table(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def check_parts(parts: list[np.ndarray], n: int, *, complete: bool) -> None:
    """Disjoint, sorted positions among n."""
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    assert not held.size or (held.min() >= 0 and held.max() < n)
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    if complete:
        assert len(held) == n


def pool_with(data: st.DataObject, groups: int) -> PartitionPool:
    n = data.draw(st.integers(8, 200))
    seed = data.draw(st.integers(0, 2**32))
    whose, labels = (rng(seed + at).integers(0, count, n) for at, count in enumerate((groups, 10)))
    return PartitionPool(labels, owners=whose, domains=whose)


COMPLETE = (
    *("iid", "shards:2", "dirichlet:0.5,min=0", "dirichlet-equal:0.1", "quantity:0.5,min=0", "dirichlet-blocks:5"),
    *("dirichlet-client:0.1", "dirichlet-client:1e-300", "dirichlet-client:2,prior=ones", "dirichlet-blocks:2,block=3"),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), spec=st.sampled_from([*COMPLETE, "labels:2", "natural", "domain"]))
def test_parts_are_disjoint_seeded_and_as_complete_as_promised(data: st.DataObject, seed: int, spec: str) -> None:
    pool = pool_with(data, data.draw(st.integers(1, 12)))
    most = len(np.unique(pool.owners)) if spec == "natural" else len(pool) // 4
    clients = data.draw(st.integers(1, most))
    try:
        parts = partition_indices(spec, pool, clients, rng(seed))
    except InputError:  # some draws are impossible; that each is said well is tested below
        assert spec.startswith(("dirichlet-blocks", "labels", "domain"))
        event("impossible")
        return
    assert len(parts) == clients
    check_parts(parts, len(pool), complete=spec in COMPLETE)
    again = partition_indices(spec, pool, clients, rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    sizes = [len(part) for part in parts]
    if spec.startswith(("dirichlet-client", "dirichlet-blocks", "iid")):
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("spec", ["dirichlet-blocks:1", "dirichlet-client:1", "labels:3", "labels:10", "quantity:1"])
def test_another_seed_gives_another_partition(spec: str) -> None:
    one, two = (partition_indices(spec, balanced(600, 10), 5, rng(seed)) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_case_that_does_not_end_elsewhere_ends_with_a_clear_error() -> None:
    """80 clients of CIFAR-10, alpha 0.01 and a minimum of 10 samples."""
    with pytest.raises(InputError, match=r"none of 1000 draws of dirichlet:0.01 gave each of 80 clients 10 .* at best"):
        partition_indices("dirichlet:0.01", balanced(50_000, 10), 80, rng())


def test_drawing_again_also_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirichlet, "SECONDS", 0.0)
    for spec in ("dirichlet:0.01", "quantity:0.01"):
        with pytest.raises(InputError, match="none of 1 draws"):
            partition_indices(spec, balanced(5000, 10), 80, rng())


# Lin's blocks


@pytest.mark.parametrize("labels", [balanced(6000, 10), np.sort(balanced(6000, 10))], ids=["mixed", "sorted"])
def test_blocks_share_disjoint_random_data(labels: np.ndarray) -> None:
    """Each block holds its clients' share of the samples, with all classes about evenly, however they are stored."""
    counts = table(partition_indices("dirichlet-blocks:0.1", labels, 30, rng()), labels)
    assert (counts.sum(axis=1) == 200).all()
    for block in np.split(counts, 3):
        assert block.sum() == 2000
        assert np.abs(block.sum(axis=0) - 200).max() < 60  # 200 ± 13 for a random third
        assert (block > 0).sum(axis=1).mean() < 7


def test_the_last_block_may_be_smaller() -> None:
    counts = table(partition_indices("dirichlet-blocks:1", labels := balanced(1300, 5), 13, rng()), labels)
    assert (counts.sum(axis=1) == 100).all()
    assert np.abs(counts[10:].sum(axis=0) - 60).max() < 30


@pytest.mark.parametrize("seed", range(5))
def test_a_slice_takes_the_tail_of_its_neighbour(seed: int) -> None:
    """Whole classes in turn: a client's classes are neighbours in the line, so all but few clients hold few."""
    labels = balanced(5000, 10)
    counts = table(partition_indices("dirichlet-blocks:0.01", labels, 50, rng(seed)), labels)
    assert (counts.sum(axis=1) == 100).all()
    assert np.mean((counts > 0).sum(axis=1)) < 3


def test_blocks_that_cannot_be_drawn() -> None:
    with pytest.raises(InputError, match=r"10 clients of a block 50 of the 1000 samples.*dirichlet-equal"):
        partition_indices("dirichlet-blocks:0.0001", np.repeat([0, 1], 500), 10, rng())


# Hsu's draw for each client


def test_label_distributions_of_clients_follow_dirichlet() -> None:
    """Two classes, prior 1/2 each: a client's share of the first is Beta(a/2, a/2), if no class runs out."""
    labels = balanced(40_000, 2)
    for spec, beta in (("dirichlet-client:4", 2), ("dirichlet-client:4,prior=ones", 4)):
        drawn = [
            np.mean(labels[part] == 0) for seed in range(10) for part in partition_indices(spec, labels, 100, rng(seed))
        ]
        assert np.mean(drawn) == pytest.approx(0.5, abs=0.02)
        # Of Beta, and of drawing 400 samples by it.
        variance = 1 / (4 * (2 * beta + 1))
        assert np.var(drawn) == pytest.approx(variance + (0.25 - variance) / 400, rel=0.15)


def test_the_prior_is_that_of_the_data() -> None:
    labels = rng(3).permutation(np.repeat([0, 1, 2], [8000, 1500, 500]))
    large = table(partition_indices("dirichlet-client:10000", labels, 10, rng()), labels)
    assert np.abs(large / 1000 - [0.8, 0.15, 0.05]).max() < 0.06
    counts = table(partition_indices("dirichlet-client:0.3", labels, 100, rng()), labels)
    assert np.mean(counts.argmax(axis=1) == 0) > 0.6
    # Few clients want the rarest class at all. Were all classes wanted alike, every third client would have some.
    assert np.mean(counts[:, 2] > 0) < 0.2


def test_a_class_that_has_gone_is_made_up_from_the_rest() -> None:
    """At the smallest alpha every client wants one class; what too many want runs out, and all still fill up."""
    labels = balanced(1000, 10)
    counts = table(partition_indices("dirichlet-client:1e-9", labels, 20, rng()), labels)
    assert (counts.sum(axis=1) == 50).all()
    assert (counts.sum(axis=0) == 100).all()
    assert (counts.max(axis=1) == 50).any()
    assert (counts.max(axis=1) < 50).any()


# k labels a client


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 40), k=st.integers(1, 10), seed=st.integers(0, 1000))
def test_k_labels_for_everyone_split_evenly(clients: int, k: int, seed: int) -> None:
    labels = balanced(1000, 10)
    counts = table(partition_indices(f"labels:{k}", labels, clients, rng(seed)), labels)
    assert ((counts > 0).sum(axis=1) == k).all()
    assert all(counts[client, client % 10] > 0 for client in range(clients))
    for column in counts.T:
        held = column[column > 0]
        assert held.size == 0 or (held.sum() == 100 and held.max() - held.min() <= 1)
    if clients >= 10:
        assert counts.sum() == 1000


def test_labels_that_nobody_holds_are_left_out() -> None:
    labels = balanced(1000, 10)
    parts = partition_indices("labels:1", labels, 3, rng())
    assert [set(labels[part]) for part in parts] == [{0}, {1}, {2}]
    assert sum(map(len, parts)) == 300


# Quantity skew


def test_sizes_follow_dirichlet_and_labels_do_not_differ() -> None:
    labels = balanced(20_000, 10)
    sizes = [len(partition_indices("quantity:2,min=0", labels, 2, rng(seed))[0]) / 20_000 for seed in range(1000)]
    assert np.mean(sizes) == pytest.approx(0.5, abs=0.03)
    assert np.var(sizes) == pytest.approx(0.05, abs=0.007)
    counts = table(partition_indices("quantity:0.5,min=500", labels, 8, rng()), labels)
    assert counts.sum(axis=1).min() >= 500
    assert counts.sum(axis=1).max() > 2 * counts.sum(axis=1).min()
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - 0.1).max() < 0.06


# What the data bring along


def writers() -> PartitionPool:
    """Writer w of six has 10 (w + 1) samples."""
    owners = rng(1).permutation(np.repeat(np.arange(6), np.arange(10, 70, 10)))
    return PartitionPool(np.arange(210) % 7, owners=owners, owner_names=tuple("abcdef"), name="letters")


def test_a_client_for_each_owner() -> None:
    pool = writers()
    parts = partition_indices("natural", pool, None, rng())
    assert [len(part) for part in parts] == [10, 20, 30, 40, 50, 60]
    assert all(set(pool.owners[part]) == {owner} for owner, part in enumerate(parts))
    assert [len(part) for part in partition_indices("natural,min=30", pool, None, rng())] == [30, 40, 50, 60]
    same = partition_indices("natural", pool, 6, rng(9))
    assert all(np.array_equal(a, b) for a, b in zip(parts, same, strict=True))


def test_some_owners_are_drawn_by_the_seed() -> None:
    pool, chosen = writers(), Counter()
    for seed in range(200):
        parts = partition_indices("natural,min=25", pool, 2, rng(seed))
        (one, *_), (two, *_) = (pool.owners[part] for part in parts)
        assert one < two
        assert [len(part) for part in parts] == [10 * (one + 1), 10 * (two + 1)]
        chosen.update((int(one), int(two)))
    assert set(chosen) == {2, 3, 4, 5}
    assert min(chosen.values()) > 60  # 100 each


def test_each_client_holds_one_domain() -> None:
    domains = rng(2).permutation(np.repeat([0, 1, 2], [100, 50, 10]))
    pool = PartitionPool(np.arange(160) % 4, domains=domains, domain_names=("photo", "sketch", "art"), name="pictures")
    assert [len(part) for part in partition_indices("domain", pool, None, rng())] == [100, 50, 10]
    seven = partition_indices("domain", pool, 7, rng())
    assert [set(domains[part]) for part in seven] == [{0}, {1}, {2}, {0}, {1}, {2}, {0}]
    assert [len(part) for part in seven] == [34, 25, 5, 33, 25, 5, 33]
    check_parts(seven, 160, complete=True)
    two = partition_indices("domain", pool, 2, rng())
    assert [set(domains[part]) for part in two] == [{0}, {1}]
    with pytest.raises(InputError, match="11 clients are to share the domain 'art', which has only 10 samples"):
        partition_indices("domain", pool, 33, rng())


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("natural", 7, "there are 6 owners in 'letters', but 7 clients were asked for"),
        ("natural,min=25", 5, "6 owners in 'letters', and 4 with 25 samples or more, but 5"),
        ("natural,min=100", None, "none of the 6 owners in 'letters' has 100 samples; the largest has 60"),
        ("natural,min=some", None, "min is 'some'"),
        ("natural:3", None, "takes no value"),
        ("domain", None, "'letters' has no domains"),
        ("iid", None, "needs the number of clients"),
        ("dirichlet-blocks:0", 3, "alpha of 'dirichlet-blocks' is '0'"),
        ("dirichlet-blocks:1,block=0", 3, "block is '0'"),
        ("dirichlet-blocks:1,min=3", 3, "no option 'min'"),
        ("dirichlet-client:-1", 3, "alpha of 'dirichlet-client' is '-1'"),
        ("dirichlet-client:1,prior=flat", 3, "prior of 'dirichlet-client' is 'flat'; expected data or ones"),
        ("quantity:0", 3, "alpha of 'quantity' is '0'"),
        ("quantity:0.001,min=20", 10, "none of 1000 draws of quantity:0.001 gave each of 10 clients 20"),
        ("quantity:1,min=80", 3, "cannot give 3 clients 80 samples each out of 210"),
        ("labels:0", 3, "labels is '0'"),
        ("labels", 3, "as in labels:2"),
        ("labels:8", 3, "each client 8 labels, but there are only 7"),
        ("labels:7", 40, "40 clients are to hold label 0, which only 30 samples have"),
        ("file:", None, "wants the path of a file"),
    ],
)
def test_impossible_requests(spec: str, clients: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition_indices(spec, writers(), clients, rng())


@pytest.mark.parametrize("spec", ["iid", "natural", "domain", "dirichlet-client:1"])
def test_nothing_cannot_be_shared(spec: str) -> None:
    empty = np.zeros(0, dtype=np.int64)
    with pytest.raises(InputError, match="'own' has no samples to share"):
        partition_indices(spec, PartitionPool(empty, owners=empty, domains=empty), 1, rng())


def test_data_without_owners_say_so() -> None:
    with pytest.raises(InputError, match="'own' does not say whose sample is whose"):
        partition_indices("natural", balanced(100, 10), None, rng())


@pytest.mark.parametrize("spec", ["dirichlet-blocks:1", "dirichlet-client:1", "labels:1"])
@pytest.mark.parametrize("labels", [np.linspace(0, 1, 100), np.zeros((100, 2), dtype=np.int64)])
def test_label_skew_wants_integer_labels(spec: str, labels: np.ndarray) -> None:
    with pytest.raises(InputError, match="integer labels"):
        partition_indices(spec, labels, 2, rng())


@pytest.mark.parametrize("spec", ["iid", "quantity:1"])
def test_numbers_to_predict_can_be_shared_too(spec: str) -> None:
    check_parts(partition_indices(spec, np.linspace(0, 1, 100), 4, rng()), 100, complete=True)


def test_the_config_knows_which_partitions_bring_their_clients() -> None:
    from fedloom.config import PARTITIONS_WITH_CLIENTS, _default_client_count

    assert {
        info.spec.partition(":")[0].partition("[")[0] for info in available_partitions() if info.determines_num_clients
    } == set(PARTITIONS_WITH_CLIENTS)
    assert [_default_client_count(spec) for spec in ("natural,min=3", "domain", "file:a,b", "iid", "naturals")] == [
        *(None, None, None),
        *(20, 20),
    ]
