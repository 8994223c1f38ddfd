"""Tests of server data: samples held back from clients, and other data sets."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import fedloom
from fedloom.core.rng import RngStreams
from fedloom.data import (
    Dataset,
    FederatedDataset,
    PartitionedDataset,
    Samples,
    load_dataset,
    partition_dataset,
    select_classes,
)
from fedloom.data.splits import (
    ServerDataSplit,
    draw_server_split,
    split_server_data,
    take_server_split,
)
from fedloom.errors import InputError


def rng(seed: int = 0) -> np.random.Generator:
    return RngStreams(seed).numpy("server data")


@given(count=some.integers(2, 500), share=some.floats(0.01, 0.99), seed=some.integers(0, 5))
def test_a_share_is_so_many_different_positions_in_order(count: int, share: float, seed: int) -> None:
    expected = int(share * count + 0.5)
    if not 0 < expected < count:
        with pytest.raises(InputError):
            draw_server_split(f"split:{share}", count, rng(seed))
        return
    kept = draw_server_split(f"split:{share}", count, rng(seed))
    assert len(kept) == expected
    assert (np.diff(kept) > 0).all()
    assert 0 <= kept[0] <= kept[-1] < count
    assert np.array_equal(kept, draw_server_split(f"split:{share}", count, rng(seed)))


def test_a_number_is_so_many_samples_and_other_seeds_keep_others() -> None:
    assert len(draw_server_split("split:7", 100, rng())) == 7
    assert len(draw_server_split("split:1", 100, rng())) == 1
    assert not np.array_equal(draw_server_split("split:7", 100, rng(0)), draw_server_split("split:7", 100, rng(1)))
    assert not len(draw_server_split(None, 100, rng()))
    assert not len(draw_server_split("mnist", 100, rng()))


@pytest.mark.parametrize("spec", ["split:0", "split:1.0", "split:1.5", "split:-0.1", "split:nan", "split:x", "split:"])
def test_what_is_no_share_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="expected a share between 0 and 1") as refused:
        draw_server_split(spec, 100, rng())
    assert repr(spec) in str(refused.value)


@pytest.mark.parametrize(("spec", "words"), [("split:100", "nothing would be left"), ("split:0.001", "which is none")])
def test_all_or_none_is_refused(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        draw_server_split(spec, 100, rng())


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "shards:2", "labels:3", "quantity:0.5"])
def test_no_client_holds_what_the_server_keeps(spec: str) -> None:
    digits = load_dataset("digits")
    held = draw_server_split("split:0.2", len(digits.train), rng())
    federation = partition_dataset(digits, spec, 10, np.random.default_rng(0), held)
    theirs = np.concatenate(federation.client_indices)
    assert np.array_equal(np.sort(np.concatenate([theirs, held])), np.arange(len(digits.train)))
    labels = torch.cat([federation.client_samples(k).y for k in range(10)]).numpy()
    assert np.array_equal(np.bincount(labels), np.bincount(np.delete(digits.train.y.numpy(), held)))


def test_positions_in_a_file_are_those_of_the_whole_data_set(tmp_path: Path) -> None:
    digits, held = load_dataset("digits"), np.array([1, 3, 11])
    (tmp_path / "parts.json").write_text(json.dumps([[0, 1, 2, 3], [10, 11, 12]]))
    federation = partition_dataset(digits, f"file:{tmp_path / 'parts.json'}", None, np.random.default_rng(0), held)
    assert [part.tolist() for part in federation.client_indices] == [[0, 2], [10, 12]]


def test_owners_keep_the_rest_of_their_samples() -> None:
    x = torch.arange(12, dtype=torch.float32)[:, None]
    owners = np.array([0, 1, 2] * 4)
    data = Dataset(
        name="owned",
        train=Samples(x, torch.zeros(12, dtype=torch.int64)),
        test=Samples(x[:1], torch.zeros(1, dtype=torch.int64)),
        class_names=("a", "b"),
        owners=owners,
        owner_names=("one", "two", "three"),
    )
    federation = partition_dataset(data, "natural,min=1", None, np.random.default_rng(0), np.array([0, 1, 4]))
    assert [part.tolist() for part in federation.client_indices] == [[3, 6, 9], [7, 10], [2, 5, 8, 11]]


def pooled() -> PartitionedDataset:
    pool = Samples(torch.arange(20, dtype=torch.float32)[:, None], torch.arange(20) % 2)
    return PartitionedDataset(pool, [np.arange(10), np.arange(10, 20)], classes=2)


def test_a_pool_of_ones_own_can_be_split_and_is_left_alone() -> None:
    own = pooled()
    lighter, held = take_server_split(own, "split:0.25", rng())
    assert len(held.samples) == 5
    assert held.classes == 2
    values = torch.cat([held.samples.x, *(lighter.client_samples(k).x for k in range(2))]).flatten()
    assert sorted(values.tolist()) == list(range(20))
    assert [len(own.client_samples(k)) for k in range(2)] == [10, 10]


def test_a_federation_without_a_pool_cannot() -> None:
    arrays = FederatedDataset.from_arrays([(np.zeros((4, 3)), np.array([0, 1, 0, 1]))], name="mine")
    with pytest.raises(InputError, match=r"'mine' are spread over their clients already.*set `server_data`"):
        take_server_split(arrays, "split:0.5", rng())
    with pytest.raises(InputError, match="'mine' bring none"):
        take_server_split(arrays, "own", rng())
    arrays.server_data = Samples(torch.zeros(2, 3), torch.tensor([0, 1]))
    federation, held = take_server_split(arrays, "own", rng())
    assert federation is arrays
    assert held.samples is arrays.server_data


@pytest.mark.parametrize(
    ("server_data", "words"),
    [
        (Samples(torch.zeros(2, 4), torch.zeros(2)), "numbers 4, but those of 'mine' are numbers 3"),
        (Samples(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)), "tokens 3, but those of 'mine' are numbers 3"),
        (Samples(torch.zeros(0, 3), torch.zeros(0)), "holds no samples"),
    ],
)
def test_data_of_another_kind_is_refused(server_data: Samples, words: str) -> None:
    arrays = FederatedDataset.from_arrays([(np.zeros((4, 3)), np.array([0, 1, 0, 1]))], name="mine")
    arrays.server_data = server_data
    with pytest.raises(InputError, match=words):
        take_server_split(arrays, "own", rng())


def test_another_data_set_must_look_alike_and_be_another() -> None:
    digits = load_dataset("digits")
    federation = partition_dataset(digits, "iid", 3, np.random.default_rng(0))
    with pytest.raises(InputError, match="'digits' is what the clients hold"):
        split_server_data(federation, "digits", load_dataset)

    def wide(name: str) -> Dataset:
        x = torch.zeros(4, 28, 28, 1, dtype=torch.uint8)
        samples = Samples(x, torch.zeros(4, dtype=torch.int64))
        return Dataset(samples, samples, tuple("0123456789"), name=name)

    with pytest.raises(InputError, match=r"'wide' has inputs of images 1 x 28 x 28, but .* images 1 x 8 x 8"):
        split_server_data(federation, "wide", wide)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    pool = Samples(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    federation = PartitionedDataset(pool, [np.arange(4)], classes=2, vocabulary_size=5, name="text")
    federation.server_data = Samples(torch.full((2, 3), 5), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="token 5, but 'text' has 5"):
        take_server_split(federation, "own", rng())


def test_the_sentence_says_what_is_held_and_who_uses_it() -> None:
    samples = Samples(torch.zeros(3, 1), torch.zeros(3))
    split = ServerDataSplit(samples, "split:3", 2).describe(("feddf", "abavg"))
    assert split == (
        "The server holds 3 samples that no client holds (--server-data split:3), used by feddf and abavg."
    )
    other = ServerDataSplit(samples, "mnist", 2).describe(())
    assert other == "The server holds 3 samples (--server-data mnist), which no method here uses."


def test_classes_are_kept_renumbered_and_named() -> None:
    everything = load_dataset("digits")
    part = select_classes(everything, "7, 2-3")
    assert (part.classes, part.class_names) == (3, ("2", "3", "7"))
    for samples, before in ((part.train, everything.train), (part.test, everything.test)):
        kept = torch.isin(before.y, torch.tensor([2, 3, 7]))
        assert torch.equal(samples.x, before.x[kept])
        assert torch.equal(torch.tensor([2, 3, 7])[samples.y], before.y[kept])
    assert select_classes(everything, None) is everything


def test_classes_of_your_own_data_cannot_be_picked() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 4
    mine = fedloom.FederatedDataset.from_arrays([(x, y)], test=(x, y))
    with pytest.raises(InputError, match="given by name"):
        fedloom.run(data=mine, model="logreg", classes="0-1")
