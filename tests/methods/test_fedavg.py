"""Tests of FedAvg against plain PyTorch, and of its invariants."""

from copy import deepcopy
from math import ceil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedloom
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import FederatedDataset
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network, build_small_run, simple_network
from tests.support import one_client
from tests.support.task_rounds import in_round


def reference(
    module: nn.Module, federation: FederatedDataset, seed: int, rounds: int, cohort: int, **options: float
) -> nn.Module:
    """FedAvg as one would write it down: slow, and obviously right."""
    streams, size = RngStreams(seed), int(options["batch_size"])
    for number in range(rounds):
        clients = streams.numpy("select", number).choice(len(federation), cohort, replace=False)
        total = sum(federation.num_examples(int(client)) for client in clients)
        mean: dict[str, Tensor] = {}
        for client in clients:
            local, samples = deepcopy(module).train(), federation.client_samples(int(client))
            optimizer = torch.optim.SGD(local.parameters(), options["lr"], momentum=options.get("momentum", 0.0))
            draws = streams.numpy("batches", number, int(client))
            for _ in range(int(options["epochs"])):
                order = torch.from_numpy(draws.permutation(len(samples)))
                for low in range(0, len(order), size or len(order)):
                    part = order[low : low + (size or len(order))]
                    for norm in (m for m in local.modules() if isinstance(m, nn.BatchNorm1d)):
                        norm.train(len(part) > 1)
                    optimizer.zero_grad()
                    F.cross_entropy(local(samples.x[part]), samples.y[part]).backward()
                    optimizer.step()
            for name, tensor in local.state_dict().items():
                if tensor.is_floating_point():
                    mean[name] = mean.get(name, 0) + tensor.double() * (len(samples) / total)
                else:
                    mean[name] = torch.maximum(mean.get(name, tensor), tensor)
        module.load_state_dict(mean)
    return module


@pytest.mark.parametrize("network", [simple_network, batch_norm_network])
def test_a_run_equals_the_naive_loop(network, tmp_path) -> None:
    federation = SmallFederatedDataset()
    options = {"epochs": 2, "batch_size": 8, "lr": 0.1, "momentum": 0.5}
    with RngStreams(5).seed_global_rng("init"):
        start = network()
    ours = fedloom.run(
        "fedavg",
        federation,
        network,
        rounds=4,
        clients_per_round=4,
        seed=5,
        out=tmp_path / "run",
        report=False,
        **options,
    ).model()
    theirs = reference(start, federation, 5, 4, 4, **options)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_one_client_with_full_batches_is_plain_sgd_bit_for_bit(tmp_path) -> None:
    x, y = torch.randn(30, 64), torch.randint(0, 10, (30,))
    federation = FederatedDataset.from_arrays([(x, y)], test=(x, y), classes=10)
    module = simple_network()
    ours = fedloom.run(
        "fedavg", federation, module, rounds=3, epochs=2, batch_size=0, lr=0.2, out=tmp_path / "run", report=False
    ).model()
    optimizer = torch.optim.SGD(module.parameters(), 0.2)
    one_client.train(module, optimizer, x, y, rounds=3, epochs=2)
    for name, tensor in module.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_clients_with_the_same_data_and_one_full_batch_take_one_central_step(tmp_path) -> None:
    x, y = torch.randn(12, 64), torch.randint(0, 10, (12,))
    federation = FederatedDataset.from_arrays([(x, y)] * 4, test=(x, y), classes=10)
    module = simple_network()
    settings = {"rounds": 1, "epochs": 1, "batch_size": 0, "lr": 0.3, "out": tmp_path / "run", "report": False}
    ours = fedloom.run("fedavg", federation, module, **settings).model()
    F.cross_entropy(module(x), y).backward()
    for name, parameter in module.named_parameters():
        central = parameter.detach() - 0.3 * parameter.grad
        torch.testing.assert_close(ours.state_dict()[name], central, rtol=1e-5, atol=1e-6)


def answers(experiment: BuiltRun, rows: list[Tensor], samples: list[int]) -> list[ClientUpdate]:
    server = experiment.rounds.parts.server
    return [
        ClientUpdate(ClientTask(client, server.global_model()), row, count, 0.0, 1)
        for client, (row, count) in enumerate(zip(rows, samples, strict=True))
    ]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_mean_is_over_the_clients_that_answered(weighting: str) -> None:
    with build_small_run("fedavg", {"fedavg": {"weighting": weighting}}).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        rows = [torch.randn(layout.size) for _ in range(3)]
        for row in rows:
            for counter in layout.views(row, fedloom.core.layout.TensorKind.INTEGER):
                counter.zero_()
        counts = [1, 5, 10]
        server.aggregate(0, iter(answers(experiment, rows, counts)))
        weights = np.array(counts if weighting == "samples" else [1, 1, 1], dtype=float)
        expected = sum(row.double() * share for row, share in zip(rows, weights / weights.sum(), strict=True))
        torch.testing.assert_close(
            server.global_model()[: layout.floats].double(), expected[: layout.floats], rtol=1e-5, atol=1e-6
        )


def test_equal_answers_are_their_own_mean_bit_for_bit() -> None:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        row = torch.randn(experiment.layout.size)
        server = experiment.rounds.parts.server
        server.aggregate(0, iter(answers(experiment, [row, row.clone(), row.clone()], [3, 7, 11])))
        assert torch.equal(server.global_model()[: experiment.layout.floats], row[: experiment.layout.floats])


def test_the_server_step_goes_beyond_the_mean_for_parameters_only() -> None:
    with build_small_run("fedavg", {"fedavg": {"server_lr": 2.0}}).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        old = server.global_model().clone()
        row = old + 1
        server.aggregate(0, iter(answers(experiment, [row], [1])))
        new = server.global_model()
        parameters, buffers = slice(0, layout.trainable), slice(layout.trainable, layout.floats)
        torch.testing.assert_close(new[parameters], old[parameters] + 2)
        assert torch.equal(new[buffers], row[buffers])


def test_steps_and_batches_are_what_was_asked_for(tmp_path) -> None:
    federation = SmallFederatedDataset()
    with build_small_run("fedavg", {}, epochs=3, batch_size=7).engine_closed() as experiment:
        jobs = list(experiment.rounds.parts.server.dispatch(0, list(range(len(federation)))))
        for update in experiment.engine.train(in_round(0, jobs)):
            assert update.steps == 3 * ceil(federation.num_examples(update.client_id) / 7)
            assert update.num_examples == federation.num_examples(update.client_id)
