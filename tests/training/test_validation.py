"""Tests of the validation split, and of trainer functions that use it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.config import TrainingConfig, config_to_command, make_config
from fedloom.core.evaluation import EVALUATION_BATCH_SIZE
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import Samples
from fedloom.errors import InputError
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.task_rounds import in_round
from tests.support.trainers import context_of


def numbered(count: int) -> Samples:
    """Samples whose first feature is their number."""
    x = torch.arange(count, dtype=torch.float32).view(-1, 1).repeat(1, 3)
    return Samples(x, torch.arange(count) % 2)


def make_bench(count: int, client: int = 0, round: int = 0, seed: int = 0, **options: Any) -> LocalTrainer:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    bench = LocalTrainer(context_of(module, TrainingConfig(**options), seed=seed))
    start = torch.linspace(-0.5, 0.5, bench.layout.size)
    bench.start_task(ClientTask(client, start, round=round), TaskMemory(bench.layout.empty()), numbered(count))
    return bench


def seen(bench: LocalTrainer, **stretch: int) -> list[list[int]]:
    """The numbers of the samples in each batch of one pass."""
    batches: list[list[int]] = []

    def look(_: LocalTrainer, batch: Batch) -> Tensor:
        batches.append(batch.x[:, 0].int().tolist())
        return torch.zeros(())

    bench.run_steps(LocalSteps(look, **stretch))
    return batches


def numbers(samples: Samples) -> list[int]:
    assert torch.equal(samples.y, samples.x[:, 0].long() % 2), "labels stay with their samples"
    return [int(number) for number in samples.x[:, 0]]


# the split


@given(st.integers(0, 40), st.floats(0, 0.999))
@settings(deadline=None, max_examples=60)
def test_what_is_held_out_is_not_trained_on(count: int, share: float) -> None:
    bench = make_bench(count, validation=share, batch_size=4)
    held = numbers(bench.validation)
    trained = [number for batch in seen(bench, epochs=1) for number in batch]
    assert sorted(held + trained) == list(range(count))
    assert len(trained) == bench.num_examples
    assert bench.num_examples >= min(1, count), "one sample is left to train on"
    assert abs(len(held) - share * count) <= 0.5 or bench.num_examples == 1


def test_the_split_belongs_to_the_client_and_to_nothing_else() -> None:
    usual = numbers(make_bench(40, client=3, validation=0.25).validation)
    assert usual == numbers(make_bench(40, client=3, round=7, validation=0.25, batch_size=3, lr=1.0).validation)
    assert usual != numbers(make_bench(40, client=4, validation=0.25).validation)
    assert usual != numbers(make_bench(40, client=3, seed=1, validation=0.25).validation)
    assert usual != list(range(10))


def test_without_a_share_nothing_is_held_out() -> None:
    bench = make_bench(10)
    assert len(bench.validation) == 0
    assert bench.num_examples == 10


def test_held_out_samples_reach_no_model() -> None:
    """Those of client 0 are made into something that no model would survive."""

    class Poisoned(SmallFederatedDataset):
        def client_samples(self, client_id: int) -> Samples:
            samples = super().client_samples(client_id)
            x = samples.x.clone()
            x[held[client_id]] = torch.nan
            return Samples(x, samples.y)

    clean, held = SmallFederatedDataset(), {}
    with build_small_run("fedavg", {}, validation=0.3).engine_closed() as experiment:
        for k in range(8):
            samples = clean.client_samples(k)
            _, held[k] = bench_of(experiment, k, samples)._split(len(samples))
    assert sum(map(len, held.values())) > 40
    usual = small_run("fedavg", {}, federated_data=clean, validation=0.3, clients_per_round=8)
    assert (
        small_run("fedavg", {}, federated_data=Poisoned(), validation=0.3, clients_per_round=8).digest == usual.digest
    )
    assert small_run("fedavg", {}, federated_data=clean, clients_per_round=8).digest != usual.digest


def bench_of(experiment: Any, client: int, samples: Samples) -> LocalTrainer:
    bench, start = experiment.engine._trainer, experiment.rounds.context.initial
    bench.start_task(ClientTask(client, start, round=0), TaskMemory(start.clone()), samples)
    return bench


def test_clients_count_by_what_they_train_on() -> None:
    with build_small_run("fedavg", {}, validation=0.5).engine_closed() as experiment:
        jobs = list(experiment.rounds.parts.server.dispatch(0, [0, 1]))
        counts = [update.num_examples for update in experiment.engine.train(in_round(0, jobs))]
    everything = [len(SmallFederatedDataset().client_samples(k)) for k in (0, 1)]
    assert counts == [n - int(0.5 * n + 0.5) for n in everything]


def test_engines_hold_out_the_same() -> None:
    plain = small_run("fedavg", {}, validation=0.3).digest
    assert small_run("fedavg", {}, validation=0.3, engine="multiprocess", workers=2).digest == plain


@pytest.mark.parametrize("share", [-0.1, 1.0, 3, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(InputError, match="validation"):
        make_config({"validation": share})


def test_the_command_says_it() -> None:
    assert config_to_command(make_config({"validation": 0.25})) == "fedloom run fedavg --validation 0.25 --device cpu"


@pytest.mark.parametrize(
    ("method", "options", "run", "share"),
    [
        ("fedavg", {}, 0.0, 0.0),
        ("fedavg", {}, 0.1, 0.1),
        ("swad", {}, 0.0, 0.2),
        ("swad", {"swad": {"validation": 0.4}}, 0.0, 0.4),
        ("swad", {}, 0.1, 0.1),
        ("fedcross+swad", {}, 0.0, 0.2),
    ],
)
def test_a_methods_own_share_holds_where_the_run_names_none(
    method: str, options: Any, run: float, share: float
) -> None:
    with build_small_run(method, options, validation=run).engine_closed() as experiment:
        samples = experiment.data.federated_data.client_samples(0)
        held = len(bench_of(experiment, 0, samples).validation)
    assert held == int(share * len(samples) + 0.5)


# scores on it


def test_validate_scores_all_that_is_held_out() -> None:
    bench = make_bench(4 * EVALUATION_BATCH_SIZE, validation=0.6, batch_size=0)
    assert len(bench.validation) > 2 * EVALUATION_BATCH_SIZE
    row = torch.randn(bench.layout.size)
    x, y = bench.validation.x, bench.validation.y
    output = x @ row[:6].view(2, 3).t() + row[6:]
    score = bench.validate(row)
    assert score.count == len(bench.validation)
    assert score.loss == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-4)
    assert score.accuracy == pytest.approx((output.argmax(1) == y).float().mean().item())


def test_a_client_too_small_for_a_split_is_judged_by_what_it_trains_on() -> None:
    bench = make_bench(2, validation=0.2)
    assert len(bench.validation) == 0
    score = bench.validate(bench.row)
    assert score.count == 2
    assert score.loss == bench.evaluate(bench.row, numbered(2)).loss
    nobody = make_bench(0, validation=0.2)
    assert nobody.validate(nobody.row).count == 0
    assert np.isnan(nobody.validate(nobody.row).loss)
    assert nobody.validate(nobody.row).accuracy is None


def test_validating_does_not_change_training() -> None:
    def trained(looks: bool) -> Tensor:
        bench = make_bench(30, validation=0.2, momentum=0.9)
        for _ in range(5):
            bench.run_steps(LocalSteps(sgd, steps=1))
            if looks:
                bench.validate(torch.randn(bench.layout.size))
        return bench.row.clone()

    assert torch.equal(trained(True), trained(False))


def sgd(bench: LocalTrainer, batch: Batch) -> Tensor:
    loss = bench.loss(batch)
    bench.backward(loss)
    bench.optimizer_step()
    return loss


# training in pieces


@given(st.integers(1, 13), st.integers(1, 6), st.lists(st.integers(0, 7), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_passes_by_steps_are_one_training_cut_in_pieces(count: int, size: int, cuts: list[int]) -> None:
    bench = make_bench(count, batch_size=size)
    pieces = [batch for steps in cuts for batch in seen(bench, steps=steps)]
    assert pieces == seen(make_bench(count, batch_size=size), steps=sum(cuts))


def test_a_pass_by_epochs_begins_anew() -> None:
    bench = make_bench(10, batch_size=4)
    seen(bench, steps=1)
    batches = seen(bench, epochs=1)
    assert sorted(number for batch in batches for number in batch) == list(range(10))


def test_the_length_of_a_pass_is_what_it_takes() -> None:
    for count in (0, 1, 10):
        for stretch in ({}, {"epochs": 3}, {"steps": 5}):
            for options in ({"epochs": 2}, {"steps": 3}, {"batch_size": 0}):
                bench = make_bench(count, **{"batch_size": 4, **options})
                length = bench.num_steps(LocalSteps(sgd, **stretch))
                assert length == len(seen(bench, **stretch)), (count, stretch, options)


def test_other_settings_hold_for_one_client() -> None:
    bench = make_bench(10, batch_size=4, lr=0.1, lr_decay=0.5, round=1)
    seen(bench, steps=1)
    bench.use_config(bench.config.model_copy(update={"batch_size": 5, "lr": 0.4, "weight_decay": 0.01, "epochs": 1}))
    assert [len(batch) for batch in seen(bench)] == [5, 5]
    assert bench.lr == 0.2
    assert bench.optimizer.weight_decay == 0.01
    bench.start_task(ClientTask(1, bench.received, round=1), TaskMemory(bench.row), numbered(10))
    assert bench.lr == 0.05
    assert bench.optimizer.weight_decay == 0
    assert [len(batch) for batch in seen(bench, epochs=1)] == [4, 4, 2]


def test_a_rate_set_between_passes_is_the_one_that_is_used() -> None:
    def rates(bench: LocalTrainer) -> Iterator[float]:
        for lr in (0.1, 0.0, 0.2):
            before, bench.lr = bench.weights.clone(), lr
            bench.run_steps(LocalSteps(sgd, steps=1))
            yield float((before - bench.weights).norm() / bench.gradient.norm())

    assert list(rates(make_bench(12, batch_size=4))) == pytest.approx([0.1, 0.0, 0.2], rel=1e-3)
