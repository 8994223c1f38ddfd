"""Tests of FedSAM: the step, unchanged state, and equality with FedAvg."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedloom.core.tasks import ClientTask, ClientUpdate, TaskMemory
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.task_rounds import in_round


def sam(rho: float, **settings: object) -> BuiltRun:
    return build_small_run("fedsam", {"fedsam": {"rho": rho}}, **settings)


def seated(experiment: BuiltRun, loss: Callable[[LocalTrainer], Tensor]) -> tuple[LocalTrainer, Batch]:
    """A bench with client 1 at it, whose loss is this function of its parameters."""
    bench, samples = experiment.engine._trainer, experiment.data.federated_data.client_samples(1)
    row = experiment.layout.empty()
    task = ClientTask(1, experiment.rounds.context.initial.clone(), round=0)
    bench.start_task(task, TaskMemory(row), samples)
    bench.loss = lambda batch: loss(bench)
    return bench, Batch(samples.x[:4], samples.y[:4])


def half_square(bench: LocalTrainer) -> Tensor:
    return sum((p.square().sum() for p in bench.module.parameters()), start=torch.zeros(())) / 2


def test_on_a_bowl_the_gradient_grows_by_rho_over_the_distance() -> None:
    """f = |v|^2 / 2: g' = v (1 + rho / |v|)."""
    with sam(0.3, lr=0.1).engine_closed() as experiment:
        bench, batch = seated(experiment, half_square)
        v = bench.weights.clone()
        experiment.rounds.parts.client.training_step(bench, batch)
        expected = v - 0.1 * v * (1 + 0.3 / v.norm())
        torch.testing.assert_close(bench.weights, expected, rtol=1e-5, atol=1e-7)


def test_weight_decay_is_no_part_of_the_ascent() -> None:
    with sam(0.3, lr=0.1, weight_decay=5.0).engine_closed() as experiment:
        slope = torch.randn(experiment.layout.trainable)
        seen = []

        def linear(bench: LocalTrainer) -> Tensor:
            seen.append(bench.weights.clone())
            return torch.cat([p.flatten() for p in bench.module.parameters()]) @ slope

        bench, batch = seated(experiment, linear)
        experiment.rounds.parts.client.training_step(bench, batch)
        torch.testing.assert_close(seen[1] - seen[0], 0.3 * slope / slope.norm(), rtol=1e-3, atol=1e-6)


def test_without_a_gradient_there_is_no_ascent() -> None:
    with sam(0.5).engine_closed() as experiment:
        bench, batch = seated(experiment, lambda bench: 0.0 * half_square(bench))
        v = bench.weights.clone()
        experiment.rounds.parts.client.training_step(bench, batch)
        assert torch.equal(bench.weights, v)


def trained(experiment: BuiltRun) -> ClientUpdate:
    (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [1]))))
    assert isinstance(update, ClientUpdate), update
    return update


def test_after_ascent_and_return_the_parameters_are_what_they_were() -> None:
    with sam(0.5, lr=0.0).engine_closed() as experiment:
        update, start = trained(experiment), experiment.rounds.context.initial
        assert update.steps > 1
        assert torch.equal(update.row[: experiment.layout.trainable], start[: experiment.layout.trainable])


def test_statistics_and_counters_see_each_batch_once() -> None:
    """Where nothing is learned, the buffers are FedAvg's bit for bit, however wide the ascent."""
    rows = []
    for name, options in (("fedsam", {"fedsam": {"rho": 5.0}}), ("fedavg", {})):
        with build_small_run(name, options, lr=0.0, epochs=2).engine_closed() as experiment:
            rows.append(trained(experiment).row.clone())
    assert torch.equal(rows[0].view(torch.uint8), rows[1].view(torch.uint8))


def test_with_rho_zero_it_is_fedavg_bit_for_bit() -> None:
    assert small_run("fedsam", {"fedsam": {"rho": 0.0}}).digest == small_run("fedavg", {}).digest
    assert small_run("fedsam", {}).digest != small_run("fedavg", {}).digest


def test_a_tiny_rho_is_fedavg_to_rounding() -> None:
    losses = [small_run(n, o).loss for n, o in (("fedsam", {"fedsam": {"rho": 1e-9}}), ("fedavg", {}))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_it_goes_with_other_servers_and_momentum() -> None:
    settings = {"model": simple_network, "momentum": 0.9, "clip": 1.0}
    digests = {small_run(name, {}, **settings).digest for name in ("fedcross+fedsam", "fedcross", "fedsam")}
    assert len(digests) == 3
