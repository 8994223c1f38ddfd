"""Tests of DiWA: a soup with the paper's values."""

import torch

from fedloom.methods import methods
from fedloom.methods.soups import _validation_merit, greedy_soup
from fedloom.testing.fixtures import build_small_run, small_run
from tests.support.task_rounds import in_round

DIWA_AS_SOUP = {
    "selection": "greedy",
    "keep": "best",
    "lr_factors": [1.0, 0.6, 0.2],
    "batch_factors": [],
    "weight_decays": [1e-4, 1e-6],
    "dropouts": [0.0, 0.1, 0.5],
}


def test_it_is_a_soup_with_mild_ranges_best_epochs_and_selection() -> None:
    soup = small_run("soups", {"soups": DIWA_AS_SOUP}, epochs=3).digest
    assert small_run("diwa", {}, epochs=3).digest == soup
    assert small_run("soups", {}, epochs=3).digest != soup


def test_it_has_all_options_of_a_soup() -> None:
    diwa, soups = methods()["diwa"].options, methods()["soups"].options
    assert diwa.model_fields.keys() == soups.model_fields.keys()
    assert all(field.description for field in diwa.model_fields.values())


def test_uniform_is_the_mean_of_all_runs_and_restricted_is_not_worse_than_the_best() -> None:
    def train(selection: str) -> tuple[torch.Tensor, list[torch.Tensor], list[float]]:
        options = {"diwa": {"selection": selection, "models": 5, "estimate": False}}
        with build_small_run("diwa", options, epochs=3, lr=0.3).engine_closed() as experiment:
            local, ends = experiment.rounds.parts.client, []
            plain = local.one_run

            def noted(bench):
                yield from plain(bench)
                ends.append(bench.row.clone())

            local.one_run = noted
            (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [1]))))
            row, bench = update.row.clone(), experiment.engine._trainer
            assert torch.equal(greedy_soup(bench, ends), row) == (selection == "greedy")
            return (
                row[: experiment.layout.floats],
                ends,
                [_validation_merit(bench, each) for each in (update.row, *ends)],
            )

    row, ends, _ = train("uniform")
    mean = torch.stack(ends)[:, : row.numel()].double().mean(0).float()
    torch.testing.assert_close(row, mean, rtol=1e-5, atol=1e-6)
    _, again, merits = train("greedy")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ends, again, strict=True)), "the same runs"
    assert merits[0] >= max(merits[1:])


def test_one_model_at_its_end_is_fedavg_bit_for_bit() -> None:
    assert small_run("diwa", {"diwa": {"models": 1, "keep": "last"}}).digest == small_run("fedavg", {}).digest
