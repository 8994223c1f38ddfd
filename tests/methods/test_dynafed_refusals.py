"""Tests of networks, data and options that DynaFed rejects, and its defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedloom
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.dynafed import DynaFedOptions
from fedloom.testing.fixtures import build_small_run

pytestmark = pytest.mark.usefixtures("one_thread")


class Words(nn.Module):
    """Takes numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.long().clamp(0, 49)).mean(1))


class Hot(nn.Module):
    """Takes numbers of tokens, without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.one_hot(x[:, 0].long().clamp(0, 2), 3).float())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Words, "an embedding.*text cannot be synthesized"),
        (Hot, "real-valued inputs with second derivatives.*not have been used"),
        (lambda: nn.Sequential(nn.Linear(64, 10), nn.Unflatten(1, (10, 1))), r"output has the shape \(2, 10, 1\)"),
    ],
)
def test_networks_it_cannot_work_with_are_refused(network: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_small_run("dynafed", {}, model=network)


def test_data_without_classes_is_refused(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 40, dtype=np.float32).reshape(20, 2)
    federation = fedloom.FederatedDataset.from_arrays([(x, x[:, :1]), (x, x[:, :1])])
    with pytest.raises(InputError, match="needs data with classes"):
        fedloom.run("dynafed", federation, lambda: nn.Linear(2, 1), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s": 20}, "s must be below L: of 20 models none has another 20"),
        ({"L": 1}, "L must be"),
        ({"augment": "blur"}, "augment must be none, dsa, or some of color.*not 'blur'"),
        ({"target": "first"}, "target"),
        ({"images_per_class": 0}, "images_per_class"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compose("dynafed", {"dynafed": options})


def test_defaults_are_the_papers_where_it_gives_them() -> None:
    options = DynaFedOptions()
    assert (options.L, options.s, options.target, options.initial, options.refine_at_synthesis) == (
        20,
        5,
        "two",
        True,
        False,
    )
    assert options.images_per_class * 10 == 150
    assert options.label_init == 0
