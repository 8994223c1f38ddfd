"""Tests of which methods need only a mean, and of their error messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate
from fedloom.errors import InputError
from fedloom.methods import Method, methods
from fedloom.methods.fedavg import FedAvgServer
from fedloom.methods.registry import BUILT_IN, register
from fedloom.testing.fixtures import SmallFederatedDataset, simple_network, small_run
from fedloom.testing.method_checks import _server_sees_only_mean, _state_after_rounds, _states_agree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
OURS = [method for method in methods().values() if method.name in BUILT_IN]

REFUSED = {
    "scaffold": "its clients send delta_c beside the model",
    "fedbabu": "a part of the model stays with the clients",
    "fedrep": "a part of the model stays with the clients",
    "fedcluster": "it chooses its clients in its own way",
    "fedmut": "it sends every client a model of its own",
}
"""Methods that need a mean alone and cannot be private for another reason."""

QUICK = {"feddf": {"feddf": {"steps": 5}}}
"""Options that make a method's server quick."""


def far_apart(updates: list[ClientUpdate], layout: Layout) -> list[ClientUpdate]:
    """Answers that have little in common."""
    answers = []
    for task, shapes in ((update.task, {name: x.shape for name, x in update.extras.items()}) for update in updates):
        draw, row = torch.Generator().manual_seed(100 + task.client_id), task.row.clone()
        row[: layout.trainable] += 0.5 * torch.randn(layout.trainable, generator=draw)
        extras = {name: torch.randint(1, 9, shape, generator=draw).float() for name, shape in shapes.items()}
        answers.append(ClientUpdate(task, row, 5, 1.0, 2 + task.client_id, extras))
    return answers


def reason_of(method: Method) -> str:
    """What the server does with single updates; empty if their mean is enough."""
    part = method.part_that_needs_updates
    return part.needs_reason if part else ""


@pytest.mark.parametrize("method", OURS, ids=lambda method: method.name)
def test_every_method_says_what_its_server_does_with_single_answers(method: Method) -> None:
    part = method.part_that_needs_updates
    assert (part is None) == (not reason_of(method))
    assert not reason_of(method).endswith(".")


@pytest.mark.parametrize("method", OURS, ids=lambda method: method.name)
def test_what_it_says_is_true(method: Method) -> None:
    """A server that needs a mean alone makes the same of copies of it, and any other server something else."""
    options = QUICK.get(method.name, {})
    of_each = _state_after_rounds(method.name, options, far_apart)
    of_mean = _state_after_rounds(
        method.name, options, lambda updates, layout: _server_sees_only_mean(far_apart(updates, layout), layout)
    )
    assert _states_agree(of_each, of_mean) == (method.part_that_needs_updates is None)


@pytest.mark.parametrize("method", OURS, ids=lambda method: method.name)
def test_a_method_runs_privately_or_says_why_not(method: Method, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clip_update": 0.5, "noise": 1.0, "rounds": 1, "engine": "sequential"}
    reason = reason_of(method) or REFUSED.get(method.name)
    if method.bracket:
        assert "epsilon" not in small_run(method.name, {}, model=simple_network, **settings).records[0]
        return
    if reason is None:
        assert small_run(method.name, {}, model=simple_network, **settings).records[0]["epsilon"] > 0
        return
    with pytest.raises(InputError, match=rf"^{method.name} cannot be run with clip_update: .*{reason}.*\.$"):
        fedloom.run(method.name, SmallFederatedDataset(), simple_network, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_parts_of_a_composition_are_all_looked_at(command: Callable[..., Any]) -> None:
    for name, culprit in {"fedcross+fedprox": "fedcross", "fedprox+feddf": "feddf"}.items():
        done = command("run", name, "--clip-update", 1)
        assert done.code == 2
        assert done.err.startswith(f"fedloom: {culprit} cannot be run with clip_update: its server ")


def test_a_server_that_sees_single_updates_is_private_only_if_it_says_so(tmp_path: Path) -> None:
    class Inherits(FedAvgServer):
        """Averages."""

    class Observes(FedAvgServer):
        """Looks at each update."""

        def observe(self, round: int, update: ClientUpdate) -> None:
            pass

    class SaysMean(Observes):
        """Looks at each update, and promises to need the mean alone."""

        needs = "mean"

    for name, server in {"mine-inherits": Inherits, "mine-observes": Observes, "mine-mean": SaysMean}.items():
        register(name)(server)
    try:
        with pytest.raises(
            InputError,
            match=r'mine-observes cannot be run .* server needs single updates \(Observes\.needs is "updates"\), but',
        ):
            fedloom.run("mine-observes", clip_update=1.0, out=tmp_path / "a")
        for name in ("mine-inherits", "mine-mean"):
            run = fedloom.run(name, clip_update=1.0, rounds=1, out=tmp_path / name, report=False)
            assert run.config.options[name]["weighting"] == "uniform"
    finally:
        from fedloom.methods import registry

        for name in ("mine-inherits", "mine-observes", "mine-mean"):
            del registry._methods[name]


# The documentation


def rows_of_the_table() -> dict[str, list[str]]:
    lines = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in lines}


def test_the_table_of_the_page_is_what_the_catalogue_says() -> None:
    table = rows_of_the_table()
    assert sorted(table) == sorted(method.name for method in OURS)
    for method in OURS:
        sums, private, why = table[method.name]
        mean_only = method.part_that_needs_updates is None
        assert sums == ("yes" if mean_only else "no")
        assert private == ("yes" if mean_only and not _refused(method.name) else "no")
        if method.bracket:
            assert why == "runs without privacy"
            continue
        if not mean_only:
            assert why == f"its server {reason_of(method)}"
        else:
            assert why == REFUSED.get(method.name, "its clients keep batch norm" if method.name == "fedbn" else "")


def _refused(name: str) -> bool:
    return name in (
        *REFUSED,
        "fedbn",
        "local",
        "centralized",
    )  # which keeps nothing where there is no batch norm, and else is refused


def test_the_figures_of_the_page_are_those_of_the_results() -> None:
    rows = json.loads((PAGE.parent.parent / "results" / "privacy.json").read_text())["rows"]
    text = PAGE.read_text()
    names = {"neither": "neither clip nor noise", "clip": "clip alone"}
    for row in rows:
        epsilon = "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
        assert f"| {names.get(row['row'], row['row'])} | {100 * row['accuracy']:.1f} | {epsilon} |\n" in text
