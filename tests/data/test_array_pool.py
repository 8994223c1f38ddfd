"""One array of inputs and one of labels, split among clients from Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.errors import InputError
from fedloom.runs.result import RunResult

DRAW = np.random.default_rng(0)
Y = np.arange(120) % 3
X = (DRAW.normal(size=(120, 4)) + Y[:, None]).astype(np.float32)
IMAGES = DRAW.integers(0, 256, (120, 6, 6)).astype(np.uint8)
TINY: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "logreg", "engine": "sequential", "report": False}


def trained(data: Any, **settings: Any) -> RunResult:
    return fedloom.run(data=data, **(TINY | settings))


@pytest.mark.parametrize("x", [X, IMAGES], ids=["numbers", "images"])
@pytest.mark.parametrize("normalize", ["default", "mean-std"])
def test_a_run_has_the_bits_of_the_same_run_on_a_file(tmp_path: Path, x: np.ndarray, normalize: str) -> None:
    np.savez(tmp_path / "mine.npz", x=x, y=Y)
    normalize = normalize if x is IMAGES else "default"
    pool = fedloom.FederatedDataset.from_pool(x, Y, partition="dirichlet:0.5,min=1", clients=6, seed=3)
    named = trained(str(tmp_path / "mine.npz"), partition="dirichlet:0.5,min=1", clients=6, seed=3, normalize=normalize)
    assert trained(pool, seed=3, normalize=normalize).digest == named.digest
    assert trained(pool, seed=4, normalize=normalize).digest != named.digest


def test_the_defaults_are_those_of_the_command() -> None:
    assert len(fedloom.FederatedDataset.from_pool(np.tile(X, (20, 1)), np.tile(Y, 20))) == 20


def test_owners_make_the_natural_partition() -> None:
    owner = np.array([f"site {k}" for k in range(4)])[np.arange(120) % 4]
    pool = fedloom.FederatedDataset.from_pool(X, Y, owner=owner)
    assert [pool.num_examples(k) for k in range(len(pool))] == [24] * 4
    assert pool.test_owners is not None
    assert np.bincount(pool.test_owners).tolist() == [6] * 4
    # Every training sample of client 2 is a row of its owner.
    rows = {tuple(row) for row in X[np.arange(120) % 4 == 2].tolist()}
    assert {tuple(row) for row in pool.client_samples(2).x.tolist()} < rows


def test_tensors_and_test_samples_of_ones_own() -> None:
    pool = fedloom.FederatedDataset.from_pool(
        torch.from_numpy(X), torch.from_numpy(Y), "iid", 5, test=(X[:7], Y[:7]), name="clouds"
    )
    assert (pool.name, len(pool), pool.classes, len(pool.pool)) == ("clouds", 5, 3, 120)
    assert pool.test is not None
    assert np.array_equal(pool.test.x.numpy(), X[:7])
    shared = fedloom.FederatedDataset.from_pool(X, Y, "iid", 5, test=0.5)
    assert len(shared.pool) == 60


def test_another_seed_gives_another_partition() -> None:
    def counts(seed: int) -> list[list[int]]:
        pool = fedloom.FederatedDataset.from_pool(X, Y, "dirichlet:0.5,min=1", 5, seed=seed)
        table = pool.label_counts()
        assert table is not None
        return table.tolist()

    assert counts(0) == counts(0)
    assert counts(0) != counts(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": Y[1:]}, "the pool: inputs of shape .* do not pair up"),
        ({"y": Y - 1}, "the pool has the label -1"),
        ({"partition": "diriclet:1"}, "unknown partition 'diriclet'"),
        ({"partition": "natural"}, "does not say whose sample is whose"),
        ({"clients": 0}, "clients"),
        ({"clients": 500, "partition": "iid"}, "cannot share 96 samples among 500 clients"),
        ({"seed": -1}, "seed"),
        ({"test": 1.5}, "test is 1.5; expected a share above 0 and below 1"),
        ({"test": (X,)}, "expected a pair"),
        ({"test": "all"}, "test is 'all'; expected a pair"),
        ({"test": (X[:, 1:], Y)}, "the test set has inputs .* as the training set has"),
        ({"owner": [1, 2]}, "the owners are of type int64 and shape .2,."),
        ({"owner": [object()] * 120}, "the owners are of type object"),
    ],
)
def test_pools_that_cannot_be_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fedloom.FederatedDataset.from_pool(**({"x": X, "y": Y} | given))


def test_normalize_needs_a_pool() -> None:
    arrays = fedloom.FederatedDataset.from_arrays([(IMAGES, Y)] * 3)
    with pytest.raises(InputError, match=r"normalize needs a data set given by name or made by from_pool"):
        trained(arrays, normalize="mean-std")
    with pytest.raises(InputError, match="has no images"):
        trained(fedloom.FederatedDataset.from_pool(X, Y, "iid", 4), normalize="half")
