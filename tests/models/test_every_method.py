"""Tests of every network with every method on a few samples.

A combination that cannot run says why.

One client holds a single sample, so each network also meets a batch of one.
"""

from math import isfinite
from typing import Any

import numpy as np
import pytest

from fedloom.config import make_config
from fedloom.core.layout import model_digest
from fedloom.data import FederatedDataset
from fedloom.errors import InputError
from fedloom.methods.registry import BUILT_IN
from fedloom.models.registry import NETWORKS
from fedloom.runs.build import build_run
from fedloom.runs.resolve import UserObjects, resolve_run
from tests.support.core_methods import CORE_METHODS

VIT = "depth=2,width=16,heads=2"
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "logreg": ("logreg", (1, 4, 4)),
    "mlp": ("mlp", (1, 4, 4)),
    "mlp-128": ("mlp-128", (1, 4, 4)),
    "lenet": ("lenet", (1, 16, 16)),
    "lenet-femnist": ("lenet-femnist", (1, 16, 16)),
    "cnn": ("cnn", (1, 4, 4)),
    "cnn-valid": ("cnn-valid", (1, 16, 16)),
    "cnn-leaf": ("cnn-leaf", (1, 4, 4)),
    "cnn-cifar": ("cnn-cifar:norm=group", (1, 4, 4)),
    "convnet": ("convnet", (1, 8, 8)),
    "resnet20": ("resnet20:width=2", (3, 4, 4)),
    "resnet20-bottleneck": ("resnet20-bottleneck:width=2", (1, 4, 4)),
    "resnet18": ("resnet18:width=2,norm=batch-stateless", (1, 4, 4)),
    "resnet50": ("resnet50:width=2,norm=group", (3, 16, 16)),
    "vgg16": ("vgg16:width=2,classifier=512", (1, 4, 4)),
    "vit-tiny": (f"vit-tiny:{VIT}", (1, 8, 8)),
    "vit-tiny-lora": (f"vit-tiny-lora:{VIT}", (1, 8, 8)),
    "vit-b16": (f"vit-b16:{VIT},patch=4,size=8", (1, 4, 4)),
    "vit-b16-lora": (f"vit-b16-lora:{VIT},patch=4,size=8", (1, 4, 4)),
    "lstm-shakespeare": ("lstm-shakespeare:hidden=4,vocabulary=7", (5,)),
    "lstm-sent140": ("lstm-sent140:hidden=4,embedding=3,vocabulary=6", (5,)),
}
"""Each network, as small as it can be, and inputs of the smallest size that makes it whole."""

SHORT: dict[str, dict[str, Any]] = {
    "diwa": {"models": 2},
    "dynafed": {"L": 2, "s": 1, "inner_steps": 1, "iterations": 1, "images_per_class": 1, "refine_at_synthesis": True},
    "fedbe": {"samples": 1, "epochs": 1},
    "fedcda": {"warmup": 0},
    "fedcluster": {"clusters": 2},
    "feddf": {"steps": 1},
    "fedgen": {"steps": 1},
    "fedlaw": {"epochs": 1},
    "fedrep": {"head_epochs": 1, "final_epochs": 1},
    "gamf": {"sweeps": 1},
    "lss": {"models": 2},
    "soups": {"models": 2},
}
"""Options that make methods quick, and let them do in the first round what they are for."""

REFUSED = {
    # torch's attention on a CPU has no second derivative
    **{(name, "dynafed"): "second derivatives" for name in CASES if name.startswith("vit")},
    ("lstm-shakespeare", "dynafed"): "text cannot be synthesized",
    ("lstm-sent140", "dynafed"): "text cannot be synthesized",
    **{
        ("logreg", method): f"{method}.* share the body of a network, but .* such as logreg, has none"
        for method in ("fedbabu", "fedrep")
    },
    **{
        (network, method): "average inputs, but the inputs of this network are tokens"
        for network in ("lstm-shakespeare", "lstm-sent140")
        for method in ("fedmix", "naivemix")
    },
}


def test_no_network_is_forgotten() -> None:
    assert set(CASES) == set(NETWORKS)


def federation(shape: tuple[int, ...]) -> FederatedDataset:
    """A client with three samples and one with one, of three classes."""
    draw = np.random.default_rng(0)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        x: np.ndarray = draw.integers(0, 7, (count, *shape))
        return (x if len(shape) == 1 else x.astype(np.float32) / 7), np.arange(count) % 3

    made = FederatedDataset.from_arrays([some(3), some(1)], test=some(3), name="few", classes=3)
    made.server_data = made.client_samples(0)
    return made


@pytest.mark.quick_if(name=("mlp", "resnet18", "lstm-shakespeare"), method=CORE_METHODS)
@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("name", CASES)
def test_a_network_trains_or_is_refused_with_the_reason(name: str, method: str) -> None:
    if name.startswith("vit"):
        pytest.importorskip("peft", reason="peft (the extra fedloom[vit]) is not installed")
        pytest.importorskip("transformers", reason="transformers (the extra fedloom[vit]) is not installed")
    model, shape = CASES[name]
    rounds = 2 if method == "dynafed" else 1
    settings = {"clients": 2, "clients_per_round": 2, "rounds": rounds, "epochs": 1, "batch_size": 3, "lr": 0.01}
    config = make_config(
        {**settings, "method": method, "options": {method: SHORT[method]} if method in SHORT else {}}
        | {"model": model, "partition": "own", "engine": "sequential", "data": "few"}
    )
    if (name, method) in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name, method]):
            build_run(resolve_run(config, UserObjects(data=federation(shape))))
        return
    with build_run(resolve_run(config, UserObjects(data=federation(shape)))).engine_closed() as experiment:
        before = experiment.rounds.parts.server.global_model().clone()
        records = [experiment.rounds.run_round(round) for round in range(rounds)]
        after, digest = experiment.rounds.parts.server.global_model(), experiment.rounds.digest()
    assert not any(record["failed"] for record in records), records[-1]["failed_clients"]
    assert experiment.layout.is_finite(after)
    if method != "fedma-layers":  # which deploys after a pass of as many rounds as there are layers
        assert digest != model_digest(before), "it learned something"
    assert all(isfinite(record["loss"]) for record in records if method != "local")
