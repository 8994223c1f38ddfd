"""Tests of `train_client`: independent draws, valid results."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.core.layout import model_digest
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import FederatedDataset
from fedloom.training.context import ClientProgram
from fedloom.training.local_training import train_client
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.trainers import make_bench, numbered, sgd


def train(bench: LocalTrainer) -> Iterator[LocalSteps]:
    yield LocalSteps(sgd)


def client_row(round: int, client: int, before: int = 0, **options: Any) -> str:
    """The digest of what `train_client` returns for a model with dropout, after `before` other draws and clients.

    All samples are alike, so that the order of the batches makes no difference.
    """
    bench = make_bench(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), **options)
    part = (torch.ones(12, 3), torch.zeros(12, dtype=torch.int64))
    federation = FederatedDataset.from_arrays([part] * 4, classes=2)
    shop = replace(bench._context, data=federation, client=ClientProgram(train))
    received = torch.linspace(-0.5, 0.5, bench.layout.size)
    row = bench.layout.empty()
    torch.rand(before + 1)
    for other in [*range(before), client]:
        train_client(bench, shop, ClientTask(other, received, round=round), TaskMemory(row))
    return model_digest(row)


def test_dropout_is_keyed_through_train_client() -> None:
    first = client_row(1, 2)
    assert client_row(1, 2, before=2) == first
    assert client_row(1, 3) != first
    assert client_row(2, 2) != first
    assert client_row(1, 2, seed=1) != first


def test_train_client_leaves_the_global_generator_alone() -> None:
    bench = make_bench(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    federation = FederatedDataset.from_arrays([(numbered(12).x, numbered(12).y)], classes=2)
    shop = replace(bench._context, data=federation, client=ClientProgram(train))
    received = torch.linspace(-0.5, 0.5, bench.layout.size)
    kept, row, before = received.clone(), bench.layout.empty(), torch.get_rng_state()
    outcome = train_client(bench, shop, ClientTask(0, received, round=0), TaskMemory(row))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(received, kept), "the received model is not to be changed"
    assert (outcome.num_examples, outcome.steps) == (12, 2)
    assert np.isfinite(outcome.loss)


def test_results_put_elsewhere_are_brought_to_their_place() -> None:
    def replacing(bench: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(sgd)
        bench.row = torch.full_like(bench.row, 3.0)
        bench.client_state = {"h": torch.ones(2)}
        bench.uploads["u"] = torch.full((1,), 5.0)

    bench = make_bench()
    federation = FederatedDataset.from_arrays([(numbered(4).x, numbered(4).y)], classes=2)
    shop = replace(bench._context, data=federation, client=ClientProgram(replacing))
    row, home, uploads = bench.layout.empty(), {"h": torch.zeros(2)}, {"u": torch.zeros(1)}
    kept_home, kept_upload = home["h"], uploads["u"]
    train_client(bench, shop, ClientTask(0, torch.zeros(bench.layout.size), round=0), TaskMemory(row, home, uploads))
    assert bool((row == 3).all())
    assert kept_home.tolist() == [1, 1]
    assert kept_upload.tolist() == [5]


@pytest.mark.parametrize(
    ("group", "value", "complaint"),
    [
        ("client_state", {"other": torch.zeros(2)}, r"client_state holds \['other'\], but \['h'\] was declared"),
        ("client_state", {"h": torch.zeros(3)}, r"client_state\['h'\] has shape \(3,\), but \(2,\) was expected"),
        ("row", torch.zeros(1), r"row has shape \(1,\)"),
    ],
)
def test_results_of_another_shape_are_refused(group: str, value: Any, complaint: str) -> None:
    def misplacing(bench: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(sgd)
        setattr(bench, group, value)

    bench = make_bench()
    federation = FederatedDataset.from_arrays([(numbered(4).x, numbered(4).y)], classes=2)
    shop = replace(bench._context, data=federation, client=ClientProgram(misplacing))
    start, home = torch.zeros(bench.layout.size), {"h": torch.zeros(2)}
    with pytest.raises(ValueError, match=complaint):
        train_client(bench, shop, ClientTask(0, start, round=0), TaskMemory(bench.layout.empty(), home))
