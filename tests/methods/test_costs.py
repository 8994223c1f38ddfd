"""Tests of the costs that methods state: bytes sent, client and server state."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.cli.catalog import read_catalog_entries
from fedloom.core.layout import TensorKind
from fedloom.methods import registry
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network
from tests.support.core_methods import CORE_METHODS

NAMES = sorted(BUILT_IN)
COSTS = {entry["name"]: entry for entry in read_catalog_entries("methods")}
CLIENTS, CLASSES, INPUTS, NUMBER = 8, 10, 64, 4
QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 5},
    "fedcda": {"warmup": 1},
    "dynafed": {"L": 4, "s": 2},
    "fedrep": {"head_epochs": 1},
}
"""Options that save time, or let a method do in four rounds what it does later."""


def played(name: str, network: Any, rounds: int = 4) -> tuple[BuiltRun, list[dict[str, Any]]]:
    """All clients take part, so that after a round each has been seen; `fedcluster` has its own idea of a round."""
    given = {name: QUICK[name]} if name in QUICK else {}
    with build_small_run(
        name, given, model=network, clients_per_round=CLIENTS, rounds=50
    ).engine_closed() as experiment:
        return experiment, [experiment.rounds.run_round(round) for round in range(rounds)]


def bytes_of(experiment: BuiltRun, kinds: tuple[type[nn.Module], ...]) -> int:
    """Bytes of the parameters and buffers of the last module of one of these kinds, with the zeros before them."""
    module = experiment.rounds.context.make_model()
    units = [name for name, each in module.named_modules() if isinstance(each, kinds)]
    own = [e.columns for e in experiment.layout.entries if units and e.layer == units[-1]]
    return sum(columns.stop - columns.start for columns in own) * NUMBER


def said(name: str, experiment: BuiltRun, clients: int) -> int:
    """The bytes of a round of so many clients, by what the catalogue says and what its words mean."""
    sends = COSTS[name]["models a round"]
    if sends in ("0", "samples once"):  # once is in the first round
        return 0
    if sends == "K(M + 1)":  # and a number for each model that came beside the client's own
        M = experiment.method.options[name].M
        return clients * ((M + 1) * experiment.layout.nbytes + (M - 1) * NUMBER)
    found = re.fullmatch(r"(\d)K(?: ([+-]) (\w+))?", sends)
    assert found is not None, f"{name} sends {sends!r}, which this test cannot read"
    total = 2 * experiment.layout.nbytes + (int(found[1]) - 2) * experiment.layout.trainable * NUMBER
    if found[2] == "-":
        home = {"heads": (nn.Linear,), "norms": (nn.BatchNorm1d,)}[found[3]]
        total -= 2 * bytes_of(experiment, home)
    if found[3] == "counts":
        total += CLASSES * NUMBER
    if found[3] == "means":  # one of each client: all of them down, one up with how many samples are behind it
        total += CLIENTS * (INPUTS + CLASSES) * NUMBER + (INPUTS + CLASSES + 1) * NUMBER
    if found[3] == "generators":  # of noise 32, hidden 256 and representations of 16, with batch norm; counts up
        generator = (32 + CLASSES + 1) * 256 + 4 * 256 + (256 + 1) * 16
        total += generator * NUMBER + CLASSES * NUMBER
    return clients * total


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("network", [simple_network, batch_norm_network], ids=["plain", "normed"])
@pytest.mark.parametrize("name", NAMES)
def test_as_many_bytes_travel_as_a_method_says(name: str, network: Any) -> None:
    experiment, records = played(name, network, rounds=9 if name == "fedcluster" else 3)
    last = records[-1]
    assert last["clients"] > 0
    assert last["bytes_down"] + last["bytes_up"] == said(name, experiment, last["clients"])


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_clients_keep_what_a_method_says(name: str) -> None:
    experiment, _ = played(name, batch_norm_network, rounds=2)
    kept = sum(torch.Size(shape).numel() for shape in experiment.engine.client_states.shapes.values()) * NUMBER
    heads = {"fedbabu": (nn.Linear,), "fedrep": (nn.Linear,), "fedbn": (nn.BatchNorm1d,)}
    meaning = {
        "nothing": [0],
        "1 model": [experiment.layout.trainable * NUMBER, experiment.layout.nbytes],
        "own layers": [bytes_of(experiment, heads.get(name, ()))],
    }
    assert kept in meaning[COSTS[name]["client state"]]


def numbers(state: Any) -> int:
    """Bytes of all tensors in the state of a part."""
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(numbers(value) for value in values)


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_the_server_keeps_what_a_method_says(name: str) -> None:
    """In whole models: a few numbers about the clients are not counted."""
    experiment, _ = played(name, simple_network, rounds=3)
    kept = sum(numbers(part.state_dict()) for _, part in experiment.rounds.parts.items()) / experiment.layout.nbytes
    says = COSTS[name]["server state"].replace("nothing", "0 models")
    symbols = {"K": CLIENTS, "N": CLIENTS, "L": 4}
    if models := re.fullmatch(r"(\d*)([KNL]?)(?:\+(\d))? models?", says):
        whole = int(models[1] or 1) * symbols.get(models[2], 1) + int(models[3] or 0)
        assert int(kept) == whole, f"it says {says}, and keeps {kept:.2f} models"
        return
    one = experiment.layout.nbytes
    pool = CLIENTS * (INPUTS + CLASSES) * NUMBER
    generator = 3 * ((32 + CLASSES + 1) * 256 + 2 * 256 + (256 + 1) * 16) * NUMBER + 2 * 256 * NUMBER
    meaning = {"model, means": one + pool, "model, G": one + generator}  # G with its optimiser, and its statistics
    assert kept * one == pytest.approx(meaning[says])


def test_a_method_of_ones_own_is_counted_too(tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    file.write_text(
        "from fedloom import AveragingServer, Client, Options, register\n"
        '@register("two-moments")\n'
        "class TwoMoments(AveragingServer[Options]):\n"
        '    """Keep two vectors."""\n'
        "    def start(self):\n"
        "        self.m, self.v = self.zeros(), self.zeros()\n"
        '@register("own-vector")\n'
        "class OwnVector(Client[Options]):\n"
        '    """Keep and send a vector."""\n'
        "    def state_shapes(self, layout):\n"
        "        return {'c': (layout.trainable,)}\n"
        "    upload_shapes = state_shapes\n"
        '@register("cannot-start")\n'
        "class CannotStart(AveragingServer[Options]):\n"
        '    """Fail at once."""\n'
        "    def start(self):\n"
        "        raise ValueError\n"
    )
    try:
        entries = {entry["name"]: entry for entry in read_catalog_entries("methods", [str(file)])}
        found = {
            name: [entries[name][key] for key in COUNTED] for name in ("two-moments", "own-vector", "cannot-start")
        }
        assert found["two-moments"] == ["2K", "nothing", "3 models"]
        assert found["own-vector"] == ["3K", "1 model", "1 model"]
        assert found["cannot-start"] == ["?", "?", "?"]
    finally:
        for name in ("two-moments", "own-vector", "cannot-start"):
            del registry._methods[name]


COUNTED = ("models a round", "client state", "server state")


def test_every_method_has_a_year_a_cost_and_words_for_its_computation() -> None:
    for entry in read_catalog_entries("methods"):
        baseline = entry["name"] in ("local", "centralized")  # no paper's
        assert entry["year"] in ([None] if baseline else range(2017, 2026)), entry["name"]
        assert entry["extra compute"], entry["name"]
        assert entry["server data"] in ("no", "inputs", "labels")
    buffers = {e.kind for e in small_layout()} - {TensorKind.PARAMETER}
    assert buffers == {TensorKind.BUFFER, TensorKind.INTEGER}, "the network of these tests has everything that travels"


def small_layout() -> Any:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        return experiment.layout.entries
