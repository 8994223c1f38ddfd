"""Tests that invalid runs from Python are rejected before anything is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom
from fedloom import InputError
from tests.support.array_data import SMALL, arrays, network


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clients": 9}, "clients is 9, but the data has 4"),
        ({"partition": "iid"}, "already divided among its clients"),
        ({"model": 5}, "not int"),
        ({"model": lambda: "net"}, "not str"),
        ({"model": lambda: nn.Linear(6, 3)}, "cannot be trained"),
        ({"model": lambda: nn.Linear(5, 2)}, "2 outputs.*3 classes|out of bounds"),
        ({"model": lambda: nn.ReLU()}, "no trainable parameter"),
        ({"loss": lambda output, y: output.sum(1)}, "one number"),
        ({"loss": lambda output, y: 1.5}, r"the loss must be a tensor with one number, not 1\.5"),
        ({"loss": lambda output, y: torch.tensor(1.5)}, "does not depend on the model's output"),
        ({"loss": "mse"}, "the loss must be a function of outputs and targets, not 'mse'"),
        ({"data": [(np.zeros((50, 5)), np.zeros(50))]}, r"FederatedDataset\.from_arrays\), not a list"),
        ({"options": {"mu": 0.1}}, r"options are given by method, such as .*, not \{'mu': 0\.1\}"),
        ({"options": "mu=0.1"}, "options are given by method, such as .*, not 'mu=0.1'"),
        ({"rouns": 3}, "'rounds'"),
        ({"clients_per_round": 5}, "clients_per_round is 5"),
        ({"method": "fedprx"}, "'fedprox'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    settings = {"data": arrays(), "model": network, "out": tmp_path / "r", **SMALL, **given}
    with pytest.raises(InputError, match=words):
        fedloom.run(**settings)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": "fedavg"}, "methods must be a list of names, such as .*, not 'fedavg'"),
        ({"methods": ["fedavg", 3]}, "methods must be a list of names"),
        ({"seeds": 1.5}, r"seeds must be a whole number, not 1\.5"),
        ({"seeds": [1, 2]}, r"seeds must be a whole number, not \[1, 2\]"),
        ({"target": "high"}, "target must be a number, not 'high'"),
        ({"options": {"mu": 0.1}}, "options are given by method"),
        ({"model": None}, "the model must be a name, an nn.Module or a function that returns one, not NoneType"),
        ({"data": None}, "data must be the name of a data set or a FederatedDataset .*, not None"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    settings = {"methods": ["fedavg"], "data": arrays(), "model": network, "out": tmp_path / "r", **SMALL, **given}
    with pytest.raises(InputError, match=words):
        fedloom.compare(**settings)
    assert not (tmp_path / "r").exists()
