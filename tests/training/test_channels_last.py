"""Tests of channels-last order: used where faster, avoided where wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedloom
from fedloom.config import make_config
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import FederatedDataset
from fedloom.errors import InputError, RunStopped
from fedloom.models import build_model as build_network
from fedloom.runs.build import BuiltRun, _make_layout, build_run, build_site_context
from fedloom.runs.callback import Callback
from fedloom.runs.check_model import check_channels_last
from fedloom.runs.resolve import UserObjects, resolve_run
from tests.support.task_rounds import in_round


class Stopping(Callback):
    """Wants the run to stop after its first round."""

    def should_stop(self) -> bool:
        return True


GIVEN: dict[str, Any] = {
    "data": "images", "partition": "own", "clients": 2, "rounds": 1, "steps": 1, "batch_size": 4, "lr": 0.01,
    "model": "own",
}  # fmt: skip


def images() -> FederatedDataset:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(4, 3, 16, 16)).astype(np.float32), np.arange(4) % 3) for _ in range(2)]
    return FederatedDataset.from_arrays(clients, classes=3, name="images")


def experiment(network: Callable[[], nn.Module], **settings: Any) -> BuiltRun:
    return build_run(
        resolve_run(make_config({**GIVEN, "engine": "sequential", **settings}), UserObjects(images(), network))
    )


def ordered(experiment: BuiltRun) -> bool:
    experiment.engine.close()
    return any(entry.channels_last for entry in experiment.layout.entries)


def narrow(channels: int = 4, stride: int | tuple[int, int] = 2, size: int = 1, groups: int = 1) -> nn.Module:
    first = nn.Conv2d(3, channels * groups, 3, padding=1)
    second = nn.Conv2d(channels * groups, 8, size, stride, groups=groups)
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", ["cnn", "lenet", "vgg16", "resnet20", "resnet18", "resnet50", "convnet"])
def test_networks_as_wide_as_the_papers_have_them_are_kept_so_on_a_cpu(name: str) -> None:
    assert check_channels_last(build_network(name, (3, 32, 32), 10)) is None


@pytest.mark.parametrize(
    ("network", "kept"),
    [
        (lambda: narrow(7), False),
        (lambda: narrow(8), True),
        (lambda: narrow(4, (1, 2)), False),
        (lambda: narrow(4, (2, 1)), False),
        (lambda: narrow(4, groups=2), False),
        (lambda: narrow(4, 1), True),
        (lambda: narrow(4, 2, 3), True),
    ],
)
def test_a_network_with_a_narrow_layer_that_takes_steps_is_not(network: Callable[[], nn.Module], kept: bool) -> None:
    assert ordered(experiment(network)) is kept
    assert not ordered(experiment(network, channels_last=False))
    if kept:
        assert ordered(experiment(network, channels_last=True))
    else:
        with pytest.raises(InputError, match=r"the layer '1' may be wrong in channels-last order on a CPU"):
            experiment(network, channels_last=True)


@pytest.mark.parametrize("channels", [1, 2, 4, 7, 8])
def test_a_step_of_such_a_network_is_right(channels: int) -> None:
    """Against the same in double precision; on a CPU with AVX2 the wrong kernel ends the process or gives nonsense."""
    with experiment(lambda: narrow(channels)).engine_closed() as made:
        layout, start, samples = made.layout, made.rounds.context.initial, made.data.federated_data.client_samples(0)
        network = made.rounds.context.make_model()
        network.load_state_dict(layout.state_dict(start))
        network.double()
        prepared = made.data.federated_data.transform(samples.x).double()
        F.cross_entropy(network(prepared), samples.y).backward()  # a batch of all samples, in whatever order
        expected = [parameter.grad for parameter in network.parameters()]
        for _ in range(20):  # what is written beyond its room need not hit something at once
            (answer,) = made.engine.train(in_round(0, [ClientTask(0, start)]))
            assert isinstance(answer, ClientUpdate)
            both = zip(layout.views(answer.row), layout.views(start), strict=True)
            ours = [(before - after).double() / made.config.lr for after, before in both]
            for found, right in zip(ours, expected, strict=True):
                assert right is not None
                torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("channels", "kept"), [(4, False), (16, True)])
def test_models_of_sites_with_other_devices_lie_alike(
    channels: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel as they lie: another order would be taken for other weights."""
    layouts = []
    for device in ("cpu", "meta"):  # which is not a CPU either, and needs no GPU
        monkeypatch.setattr("fedloom.runs.build.select_device", lambda _, device=device: torch.device(device))
        own = UserObjects(images(), lambda: narrow(channels))
        _, shop = build_site_context(resolve_run(make_config({**GIVEN, "engine": "sequential"}), own))
        layouts.append(shop.layout)
    assert layouts[0].entries == layouts[1].entries
    assert any(entry.channels_last for entry in layouts[0].entries) is kept


@pytest.mark.parametrize(
    ("settings", "ordered"),
    [
        ({}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "bf16"}, True),
        ({"channels_last": False}, False),
        ({"precision": "fp32", "channels_last": True}, True),
    ],
)
def test_elsewhere_it_depends_on_the_network_and_the_precision(settings: dict[str, Any], ordered: bool) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 65, 3), nn.BatchNorm2d(65), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(65, 3)
        )

    config = make_config({**GIVEN, "engine": "sequential", "device": "cuda", **settings})
    layout, numerics = _make_layout(config, wide(), images(), torch.device("meta"))
    assert numerics.channels_last is ordered
    assert any(entry.channels_last for entry in layout.entries) is ordered


def test_models_in_another_order_are_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a version decided otherwise, or a network was changed: their weights would be taken for others."""

    def wide() -> nn.Module:
        return narrow(8)

    given = {"rounds": 3, "steps": 1, "engine": "sequential", "report": False, "checkpoint_seconds": 0}
    out = tmp_path / "run"
    with pytest.raises(RunStopped):
        fedloom.run("fedavg", images(), wide, out=out, callbacks=[Stopping()], **given)
    monkeypatch.setattr("fedloom.runs.build.check_channels_last", lambda module: "1")
    with pytest.raises(InputError, match="the layers or the order of their weights differ"):
        fedloom.resume(out, data=images(), model=wide, report=False)
    monkeypatch.undo()
    assert len(fedloom.resume(out, data=images(), model=wide, report=False).history) == 4
