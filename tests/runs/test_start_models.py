"""Tests of start models: ordinary training with `centralized`, and `--init`."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fedloom
from fedloom.core.rng import RngStreams
from fedloom.data import load_dataset
from fedloom.errors import RunStopped
from fedloom.models import build_model
from tests.support.callbacks import Eye

Command = Callable[..., Any]
EPOCHS: dict[str, Any] = {
    "clients": 1, "epochs": 1, "batch_size": 64, "lr_schedule": "cosine", "engine": "sequential", "report": False,
}  # fmt: skip
"""One epoch a round."""


def test_one_client_and_one_epoch_a_round_is_ordinary_training(tmp_path: Path) -> None:
    """The same as a loop with torch.optim: the optimizer lives on between epochs and the rate follows the cosine."""
    settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "lr": 0.1}
    made = fedloom.run("centralized", model="logreg", rounds=3, out=tmp_path / "run", **EPOCHS, **settings)  # type: ignore[arg-type]
    dataset, streams = load_dataset("digits"), RngStreams(0)
    with streams.seed_global_rng("init"):
        module = build_model("logreg", (1, 8, 8), 10)
    optimizer = torch.optim.SGD(module.parameters(), **settings)  # type: ignore[arg-type]
    x, y = dataset.transform(dataset.train.x), dataset.train.y
    for epoch in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        order = torch.from_numpy(streams.numpy("batches", epoch, 0).permutation(len(y)))
        for batch in order.split(64):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    for name, tensor in load_file(made.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-5, atol=1e-6)
    right = module(dataset.transform(dataset.test.x)).argmax(dim=1) == dataset.test.y
    assert made.last_accuracy == pytest.approx(float(right.float().mean()))
    assert float(right.float().mean()) > 0.9


@pytest.mark.parametrize("optimizer", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.003}], ids=["sgd", "adam"])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """With everything that has state: momentum or moments, augmentation, the schedule with its warm-up."""
    settings = {**EPOCHS, **optimizer, "rounds": 4, "augment": "crop+flip", "model": "cnn", "classes": "0-1"}
    settings |= {"lr_warmup": 1}
    whole = fedloom.run("centralized", out=tmp_path / "whole", **settings)
    out = tmp_path / "part"
    with pytest.raises(RunStopped):
        fedloom.run("centralized", out=out, callbacks=[Eye(stop_after=1)], **settings)
    with pytest.raises(RunStopped):
        fedloom.resume(out, callbacks=[Eye(stop_after=2)])
    assert fedloom.resume(out, engine="multiprocess", workers=1, report=False).digest == whole.digest


def test_half_of_the_classes_then_the_rest_is_two_commands(command: Command, tmp_path: Path) -> None:
    first = ("--clients", 1, "--rounds", 2, "--epochs", 1, "--classes", "0-4")
    assert command("run", "centralized", *first, "--out", "half", "-q").code == 0
    run = ("run", "fedavg", "--classes", "5-9", "--clients", 5, "--rounds", 1, "--partition", "dirichlet:1")
    ended = command(*run, "--init", "half", "--out", "r")
    assert ended.code == 0, ended.err
    assert "6 of 6 tensors" in ended.err
    assert "trained for the classes 0, 1, 2, 3, 4; use --new-head" in ended.err
    names = json.loads((tmp_path / "r" / "partition.json").read_text())["class_names"]
    assert names == ["5", "6", "7", "8", "9"]
    ended = command(*run, "--init", "half", "--new-head", "--out", "s")
    assert "new classifier head.weight, head.bias (as requested)" in ended.err
    assert "--new-head starts" not in ended.err
    ended = command(*run, "--init", "half", "--model", "logreg", "--out", "t")
    assert ended.code == 2
    assert "(the network 'mlp')" in ended.err
