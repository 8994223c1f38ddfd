"""Tests of custom losses with tensors: moved to the device, originals unchanged."""

import pytest
import torch
from torch import nn

from fedloom.config import make_config
from fedloom.runs.build import build_site_context
from fedloom.runs.resolve import UserObjects, resolve_run
from fedloom.testing.fixtures import SmallFederatedDataset, simple_network


@pytest.mark.parametrize("device", ["cpu", "meta"])  # which is not a CPU either, and needs no GPU
def test_a_loss_with_weights_is_on_the_device_of_the_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.runs.build.select_device", lambda _: torch.device(device))
    given, data = nn.CrossEntropyLoss(weight=torch.ones(10)), SmallFederatedDataset()
    config = make_config(
        {"data": "small", "partition": "own", "model": "own", "clients": len(data), "engine": "sequential"}
    )
    _, shop = build_site_context(resolve_run(config, UserObjects(data, simple_network, given)))
    used = shop.criterion
    assert isinstance(used, nn.CrossEntropyLoss)
    assert used.weight is not None
    assert used.weight.device.type == device
    assert given.weight is not None
    assert given.weight.device.type == "cpu"
