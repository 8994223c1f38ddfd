"""Tests of distillation models: whole or by batch, on images, tokens, numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.config import make_config
from fedloom.data import PartitionedDataset, Samples
from fedloom.errors import InputError
from fedloom.methods._support import distillation as module
from fedloom.methods._support.distillation import DistillationData
from fedloom.runs.build import build_run
from fedloom.runs.resolve import resolve_run
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network, small_run
from tests.support.proxy_data import noisy, put_together

IMAGES = {"method": "feddf", "model": "cnn", "clients": 4, "engine": "sequential", "server_data": "split:30"}


def test_inputs_are_the_same_ready_made_and_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_run(resolve_run(make_config(IMAGES))).engine_closed() as experiment:
        context = experiment.rounds.context
        at_once = DistillationData(context, "feddf")
        monkeypatch.setattr(module, "MOST_PREPARED", 0)
        by_batch = DistillationData(context, "feddf")
        index = torch.tensor([3, 0, 29])
        assert at_once._x is not None
        assert by_batch._x is None
        assert torch.equal(at_once.inputs(index), by_batch.inputs(index))
        assert torch.equal(at_once.outputs(context.initial), by_batch.outputs(context.initial))


def test_outputs_are_those_of_the_deployed_model() -> None:
    with put_together("feddf", {}, batch_norm_network) as experiment:
        context, row = experiment.rounds.context, noisy(experiment, 1)[0]
        proxy, network = DistillationData(context, "feddf"), context.make_model().eval()
        experiment.layout.bind(network, row.clone())
        assert context.server.data is not None
        assert torch.allclose(proxy.outputs(row), network(context.server.data.x), atol=1e-6)
        few = torch.tensor([5, 2])
        assert torch.allclose(proxy.outputs(row, few), proxy.outputs(row)[few], atol=1e-6)


@pytest.mark.parametrize(("size", "sizes"), [(0, [80]), (32, [32, 32, 16]), (500, [80])])
def test_batches_hold_every_position_once(size: int, sizes: list[int]) -> None:
    with put_together("feddf", {}) as experiment:
        proxy = DistillationData(experiment.rounds.context, "feddf")
        batches = list(proxy.batches(np.random.default_rng(0), size))
        assert [len(batch) for batch in batches] == sizes
        assert sorted(torch.cat(batches).tolist()) == list(range(80))
        some = list(proxy.batches(np.random.default_rng(0), 2, torch.tensor([7, 9, 11])))
        assert sorted(torch.cat(some).tolist()) == [7, 9, 11]


def test_without_data_it_says_so() -> None:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        assert experiment.rounds.context.server.data is None
        with pytest.raises(InputError, match="feddf needs data on the server"):
            DistillationData(experiment.rounds.context, "feddf")


class Reader(nn.Module):
    """Says something about three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(x).flatten(1))
        return result


@pytest.mark.parametrize("method", ["feddf", "fedbe", "abavg", "fedlaw"])
def test_text_is_no_trouble(method: str) -> None:
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.integers(0, 6, (60, 3)))
    pool = Samples(x, (x.sum(1) > 7).long())
    federation = PartitionedDataset(pool, np.array_split(np.arange(60), 5), classes=2, vocabulary_size=6, test=pool)
    options = {"feddf": {"steps": 10}} if method == "feddf" else {}
    finished = small_run(method, options, federated_data=federation, model=Reader, server_data="split:0.2")
    plain = small_run("fedavg", {}, federated_data=federation, model=Reader, server_data="split:0.2")
    assert np.isfinite(finished.loss)
    assert finished.digest != plain.digest


def test_outputs_that_are_no_rows_are_refused() -> None:
    def network() -> nn.Module:
        return nn.Sequential(*simple_network(), nn.Unflatten(1, (10, 1)))

    with build_small_run("fedavg", {}, model=simple_network, server_data="own").engine_closed() as experiment:
        context = replace(experiment.rounds.context, make_model=network)
        with pytest.raises(InputError, match=r"needs one row of outputs .* shape \(1, 10, 1\)"):
            DistillationData(context, "abavg")
