"""Tests that averaged client models get their own batch norm statistics.

SWA, SWAD and soups average models on a client.
"""

from typing import Any

import pytest
import torch

from fedloom import ClientUpdate
from fedloom.core.layout import TensorKind
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network
from tests.support.task_rounds import in_round

AVERAGING: dict[str, dict[str, Any]] = {
    "swa": {"start": 0.0},
    "swad": {"optimum_patience": 1, "tolerance": 1e9},
    "soups": {},
    "diwa": {"selection": "uniform"},
}
"""Options with which several models are averaged for certain."""


def returned(name: str, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """What client 1 returns, by name and as a row, and the samples it trained on."""
    with build_small_run(name, {name: options}, epochs=3, lr=0.3).engine_closed() as experiment:
        (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [1]))))
        assert isinstance(update, ClientUpdate), update
        bench = experiment.engine._trainer
        return update.row.clone(), experiment.layout.state_dict(update.row), bench._data.x.clone()


@pytest.mark.parametrize("name", AVERAGING)
def test_the_statistics_are_those_of_the_mean_on_the_clients_samples(name: str) -> None:
    _, state, x = returned(name, AVERAGING[name])
    module = batch_norm_network()
    module.load_state_dict(state)
    with torch.no_grad():
        before = module[0](x)
    torch.testing.assert_close(state["1.running_mean"], before.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["1.running_var"], before.var(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", AVERAGING)
def test_nothing_else_changes_and_it_may_be_left_out(name: str) -> None:
    mine, state, _ = returned(name, AVERAGING[name])
    theirs, averaged, _ = returned(name, {**AVERAGING[name], "estimate": False})
    with build_small_run(name, {}).engine_closed() as experiment:
        entries = experiment.layout.entries
    for entry in entries:
        same = torch.equal(state[entry.name], averaged[entry.name])
        assert same == (entry.kind is not TensorKind.BUFFER), entry.name
    assert not torch.equal(mine, theirs)


@pytest.mark.parametrize("name", AVERAGING)
def test_a_comparison_that_would_not_treat_all_alike_is_told_so(name: str) -> None:
    def said(options: dict[str, Any], **settings: Any) -> list[str]:
        with build_small_run(name, {name: options}, **settings).engine_closed() as experiment:
            return [note for note in experiment.notes if "--statistics estimated" in note]

    assert len(said({})) == 1
    assert f"{name}.estimate" in said({})[0]
    assert said({}, statistics="estimated") == []
    assert said({"estimate": False}) == []
    assert said({}, model=simple_network) == []
    if name != "swad":
        assert said({"snapshots" if name == "swa" else "models": 1}) == []
