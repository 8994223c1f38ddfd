"""Tests of model soups: ingredients, greedy choice, equality with FedAvg."""

import shlex
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom
from fedloom.config import config_to_command, make_config, parse_config_overrides
from fedloom.core.averaging import average_models
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate, TaskMemory
from fedloom.data import FederatedDataset
from fedloom.errors import InputError
from fedloom.methods import soups
from fedloom.methods.soups import _validation_merit, greedy_soup
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import build_small_run, small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.task_rounds import in_round


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.25), nn.ReLU(), nn.Linear(16, 10), nn.Dropout(0.0))


class Trace:
    """What the runs of one client had and gave."""

    def __init__(self, experiment: BuiltRun, client: int = 1) -> None:
        local = experiment.rounds.parts.client
        self.starts: list[Tensor] = []
        self.ends: list[Tensor] = []
        self.settings: list[tuple[float, int, float, list[float]]] = []
        self.batches: list[list[Tensor]] = []
        plain, step = local.one_run, local.training_step

        def noted(bench: LocalTrainer) -> Any:
            self.starts.append(bench.row.clone())
            rates = [layer.p for layer in bench.module.modules() if isinstance(layer, nn.Dropout)]
            self.settings.append((bench.lr, bench.config.batch_size, bench.optimizer.weight_decay, rates))
            self.batches.append([])
            yield from plain(bench)
            self.ends.append(bench.row.clone())

        def looked(bench: LocalTrainer, batch: Batch) -> Tensor:
            self.batches[-1].append(batch.x.clone())
            return step(bench, batch)

        local.one_run, local.training_step = noted, looked
        jobs = list(experiment.rounds.parts.server.dispatch(0, [client]))
        (self.update,) = experiment.engine.train(in_round(0, jobs))
        assert isinstance(self.update, ClientUpdate), self.update


def started(experiment: BuiltRun, client: int = 1) -> LocalTrainer:
    """The bench with a client's work laid out on it."""
    bench, start = experiment.engine._trainer, experiment.rounds.context.initial
    samples = experiment.data.federated_data.client_samples(client)
    bench.start_task(ClientTask(client, start, round=0), TaskMemory(start.clone()), samples)
    return bench


# the runs


def test_every_run_starts_at_the_received_model_and_their_mean_is_returned() -> None:
    options = {"soups": {"models": 3, "estimate": False}}
    with build_small_run("soups", options, epochs=2).engine_closed() as experiment:
        trace = Trace(experiment)
        floats = experiment.layout.floats
        assert len(trace.starts) == 3
        assert all(torch.equal(start, experiment.rounds.context.initial) for start in trace.starts)
        assert len({tuple(end.tolist()) for end in trace.ends}) == 3, "three different models"
        mean = torch.stack(trace.ends)[:, :floats].double().mean(0).float()
        torch.testing.assert_close(trace.update.row[:floats], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", ["uniform", "greedy"])
def test_one_model_is_fedavg_bit_for_bit(selection: str) -> None:
    one = {"soups": {"models": 1, "selection": selection}}
    for values in ({"epochs": 2}, {"steps": 3, "momentum": 0.9}):
        assert small_run("soups", one, **values).digest == small_run("fedavg", {}, **values).digest
    assert small_run("soups", {}).digest != small_run("fedavg", {}).digest


def test_the_first_run_is_fedavgs_whatever_the_ranges() -> None:
    with build_small_run("fedavg", {}, epochs=2).engine_closed() as experiment:
        (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [1]))))
        expected = update.row.clone()
    with build_small_run("soups", {}, epochs=2).engine_closed() as experiment:
        assert torch.equal(Trace(experiment).ends[0], expected)


def test_the_others_draw_from_the_ranges() -> None:
    options = {"models": 40, "lr_factors": [1, 0.5], "batch_factors": [0.5, 2], "weight_decays": [0.1, 0.2]}
    chosen = {"soups": {**options, "dropouts": [0.4, 0.6]}}
    with build_small_run("soups", chosen, model=dropping, steps=1).engine_closed() as experiment:
        trace = Trace(experiment)
        after = [layer.p for layer in experiment.engine._trainer.module.modules() if isinstance(layer, nn.Dropout)]
    assert trace.settings[0] == (0.1, 8, 0.0, [0.25, 0.0])
    lrs, sizes, decays, rates = zip(*trace.settings[1:], strict=True)
    assert set(lrs) == {0.1, 0.05}
    assert set(sizes) == {4, 16}
    assert set(decays) == {0.1, 0.2}
    assert {tuple(rate) for rate in rates} == {(0.4, 0.4), (0.6, 0.6)}
    assert len(set(zip(lrs, sizes, decays, map(tuple, rates), strict=True))) > 8, "drawn independently"
    assert {len(batches[0]) for batches in trace.batches[1:]} == {4, 16}
    assert after == [0.25, 0.0], "the network is left as it was"


def test_empty_ranges_leave_everything_alone_but_the_order_of_the_batches() -> None:
    nothing: dict[str, list[float]] = {
        name: [] for name in ("lr_factors", "batch_factors", "weight_decays", "dropouts")
    }
    with build_small_run("soups", {"soups": {**nothing, "models": 2}}, model=dropping).engine_closed() as experiment:
        trace = Trace(experiment)
    assert trace.settings[0] == trace.settings[1]
    first, second = (torch.cat(batches) for batches in trace.batches)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values), "the same samples"


def test_whole_batches_stay_whole() -> None:
    with build_small_run("soups", {"soups": {"batch_factors": [0.5]}}, batch_size=0).engine_closed() as experiment:
        trace = Trace(experiment)
        assert all(len(batches[0]) == experiment.data.federated_data.num_examples(1) for batches in trace.batches)


def test_the_draws_belong_to_round_and_client() -> None:
    with build_small_run("soups", {"soups": {"models": 12}}).engine_closed() as experiment:
        local, bench = experiment.rounds.parts.client, experiment.engine._trainer

        def drawn(round: int, client: int) -> list[float]:
            start = experiment.rounds.context.initial
            samples = experiment.data.federated_data.client_samples(client)
            bench.start_task(ClientTask(client, start, round=round), TaskMemory(start.clone()), samples)
            return [recipe.config.lr for recipe in local.recipes(bench)]

        assert drawn(2, 1) == drawn(2, 1)
        assert drawn(2, 1) != drawn(3, 1)
        assert drawn(2, 1) != drawn(2, 2)


def test_epochs_of_each_model_make_the_budget() -> None:
    """Two models of two epochs cost what four epochs of FedAvg cost, where the batches are alike."""
    options = {"soups": {"models": 2, "epochs": 2, "batch_factors": []}}
    with build_small_run("soups", options, epochs=4).engine_closed() as experiment:
        steps = Trace(experiment).update.steps
        assert steps == 4 * -(-experiment.data.federated_data.num_examples(1) // 8)


def test_a_client_that_failed_leaves_nothing_to_the_next() -> None:
    with build_small_run("soups", {"soups": {"dropouts": [0.9]}}, model=dropping).engine_closed() as experiment:
        bench = started(experiment)
        for number, _ in enumerate(experiment.rounds.parts.client.train(bench)):
            if number == 1:
                break  # as if it had raised
        assert bench.module[1].p == 0.9
        assert Trace(experiment).settings[0] == (0.1, 8, 0.0, [0.25, 0.0])


@pytest.mark.parametrize(
    "options", [{"lr_factors": [0]}, {"weight_decays": [-1]}, {"dropouts": [1]}, {"batch_factors": [-2]}, {"models": 0}]
)
def test_ranges_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        build_small_run("soups", {"soups": options})


# identity


@pytest.mark.parametrize("selection", ["uniform", "greedy"])
def test_identical_models_make_exactly_that_model(selection: str) -> None:
    options = {"soups": {"selection": selection, "models": 5}}
    with build_small_run("soups", options, lr=0.0).engine_closed() as experiment:
        trace, trainable = Trace(experiment), experiment.layout.trainable
        assert torch.equal(trace.update.row[:trainable], experiment.rounds.context.initial[:trainable])


# greedy


LINE = Layout.of(nn.Linear(1, 1, bias=False))


class Fake:
    """A bench on which a model is one number, as good as a table says."""

    layout = LINE

    def __init__(self, merits: dict[float, float]) -> None:
        self.merits = merits


def fake_merit(bench: Fake, row: Tensor) -> float:
    return bench.merits[round(float(row), 4)]


@pytest.mark.parametrize(
    ("merits", "strict", "expected"),
    [
        ({0: 0.9, 4: 0.8, 2: 0.95}, False, 2),  # 0 and 4: their mean is better than either
        ({0: 0.9, 4: 0.8, 2: 0.9}, False, 2),  # as good: taken
        ({0: 0.9, 4: 0.8, 2: 0.9}, True, 0),  # unless it must be better
        ({0: 0.9, 4: 0.8, 2: 0.85}, False, 0),
    ],
)
def test_two_models_by_hand(
    merits: dict[float, float], strict: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soups, "_validation_merit", fake_merit)
    rows = [torch.tensor([4.0]), torch.tensor([0.0])]
    assert float(greedy_soup(Fake(merits), rows, strict)) == expected


def test_the_order_is_that_of_merit_and_what_was_refused_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 is best; 3 is tried next and refused; then 0 is averaged with 9 alone."""
    monkeypatch.setattr(soups, "_validation_merit", fake_merit)
    bench = Fake({9: 0.8, 3: 0.7, 0: 0.6, 6: 0.75, 4.5: 0.9})
    rows = [torch.tensor([value]) for value in (0.0, 3.0, 9.0)]
    assert float(greedy_soup(bench, rows)) == 4.5


def test_what_was_taken_is_the_mark_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 and 3 make 6, which is better; with 0 it would be 4, worse than 6 though better than 9 alone."""
    monkeypatch.setattr(soups, "_validation_merit", fake_merit)
    bench = Fake({9: 0.8, 3: 0.7, 0: 0.6, 6: 0.9, 4: 0.85})
    rows = [torch.tensor([value]) for value in (0.0, 3.0, 9.0)]
    assert float(greedy_soup(bench, rows)) == 6


def test_one_ingredient_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soups, "_validation_merit", fake_merit)
    assert float(greedy_soup(Fake({7: 0.1}), [torch.tensor([7.0])])) == 7


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.1, 3))
@settings(max_examples=25, deadline=None)
def test_the_greedy_soup_is_never_worse_on_validation_than_its_best_model(seed: int, count: int, spread: float) -> None:
    with build_small_run("soups", {"soups": {"selection": "greedy"}}).engine_closed() as experiment:
        bench = started(experiment)
        assert len(bench.validation) > 3
        generator = torch.Generator().manual_seed(seed)
        rows = [bench.received.clone() for _ in range(count)]
        for row in rows:
            row[: bench.layout.trainable] += spread * torch.randn(bench.layout.trainable, generator=generator)
        kept = [row.clone() for row in rows]
        soup = greedy_soup(bench, rows)
        assert _validation_merit(bench, soup) >= max(_validation_merit(bench, row) for row in rows)
        assert all(torch.equal(row, before) for row, before in zip(rows, kept, strict=True))


def test_a_greedy_client_returns_the_greedy_soup_of_its_runs() -> None:
    options = {"soups": {"selection": "greedy", "models": 5}}
    with build_small_run("soups", options, epochs=3, lr=0.3).engine_closed() as experiment:
        trace = Trace(experiment)
        mine = trace.update.row.clone()
        bench = started(experiment)
        assert torch.equal(mine, greedy_soup(bench, trace.ends, estimate=True))
        best = max(_validation_merit(bench, row) for row in trace.ends)
        assert _validation_merit(bench, mine) >= best > _validation_merit(bench, bench.received)


def test_a_model_that_is_not_finite_is_never_chosen() -> None:
    with build_small_run("soups", {"soups": {"selection": "greedy"}}).engine_closed() as experiment:
        bench = started(experiment)
        broken, sound = bench.received.clone(), bench.received.clone()
        broken[: bench.layout.trainable] = torch.nan
        assert _validation_merit(bench, broken) == -inf
        assert torch.equal(greedy_soup(bench, [broken, sound]), sound)


def test_what_is_held_out_is_what_is_needed() -> None:
    for options, share in (
        ({}, 0.0),
        ({"selection": "greedy"}, 0.2),
        ({"keep": "best"}, 0.2),
        ({"selection": "greedy", "models": 1}, 0.0),
        ({"selection": "greedy", "validation": 0.4}, 0.4),
    ):
        with build_small_run("soups", {"soups": options}).engine_closed() as experiment:
            bench = started(experiment)
            assert len(bench.validation) == int(share * experiment.data.federated_data.num_examples(1) + 0.5), options


# the best epoch


@pytest.mark.parametrize("stretch", [{"epochs": 5}, {"steps": 9}])
def test_the_best_epoch_of_a_run_is_kept(stretch: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[float, Tensor]] = []

    def noted(bench: LocalTrainer, row: Tensor) -> float:
        value = [0.1, 0.7, 0.3, 0.7, 0.2][len(looked) % 5]
        looked.append((value, row.clone()))
        return value

    monkeypatch.setattr(soups, "_validation_merit", noted)
    values = {**stretch, "batch_size": 16}
    with build_small_run("soups", {"soups": {"keep": "best", "models": 1}}, **values).engine_closed() as experiment:
        assert torch.equal(Trace(experiment).update.row, looked[3][1]), "the later of two that are as good"
    assert len({tuple(row.tolist()) for _, row in looked}) == len(looked) == 5


def test_looking_for_the_best_epoch_does_not_change_the_training() -> None:
    def last(keep: str) -> list[list[Tensor]]:
        options = {"soups": {"keep": keep, "models": 2}}
        with build_small_run("soups", options, epochs=3, validation=0.2).engine_closed() as experiment:
            return Trace(experiment).batches

    for mine, theirs in zip(last("best"), last("last"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# elsewhere


def test_without_classes_the_loss_is_judged(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 2, generator=generator)
    federation = FederatedDataset.from_arrays([(part, part @ torch.tensor([[1.0], [2.0]])) for part in x])
    run = fedloom.run(
        "soups",
        federation,
        nn.Linear(2, 1, bias=False),
        options={"soups": {"selection": "greedy", "keep": "best", "lr_factors": [1.0, 1e-6]}},
        out=tmp_path / "run",
        report=False,
        engine="sequential",
        rounds=5,
        lr=0.1,
    )
    assert torch.allclose(run.model().weight.detach(), torch.tensor([[1.0, 2.0]]), atol=0.05)


def test_the_average_of_rows_is_out_of_place() -> None:
    rows = [torch.tensor([1.0]), torch.tensor([4.0])]
    assert float(average_models(LINE, rows)) == 2.5
    assert [float(row) for row in rows] == [1, 4]


@pytest.mark.exhaustive
def test_it_keeps_the_contract_when_greedy_and_combined() -> None:
    check_method("fedmr+soups", {"soups": {"selection": "greedy", "keep": "best", "models": 3}})


def test_its_lists_are_one_line_of_a_command() -> None:
    ranges = {"lr_factors": [1.0, 0.5], "dropouts": []}
    command = config_to_command(make_config({"method": "soups", "options": {"soups": ranges}}))
    assert command == "fedloom run soups --device cpu --set 'soups.lr_factors=[1.0, 0.5]' --set 'soups.dropouts=[]'"
    given = [word for word in shlex.split(command) if word.startswith("soups.")]
    assert parse_config_overrides(given) == {"soups": ranges}
