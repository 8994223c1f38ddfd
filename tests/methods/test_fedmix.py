"""Tests of FedMix and NaiveMix: means, losses, and equality with FedAvg."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.tasks import ClientTask, ClientUpdate, TaskMemory
from fedloom.errors import InputError
from fedloom.methods.fedmix import fedmix_loss
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import (
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
    small_run,
)
from fedloom.training.batches import Batch
from tests.support.task_rounds import in_round

NAMES = ["fedmix", "naivemix"]


@pytest.mark.parametrize("name", NAMES)
def test_without_lambda_it_is_fedavg_bit_for_bit(name: str) -> None:
    assert small_run(name, {name: {"lam": 0.0}}).digest == small_run("fedavg", {}).digest


@pytest.mark.parametrize("name", NAMES)
def test_the_first_round_has_no_means_yet_and_is_fedavg(name: str) -> None:
    assert small_run(name, {}, rounds=1).digest == small_run("fedavg", {}, rounds=1).digest
    assert small_run(name, {}, rounds=2).digest != small_run("fedavg", {}, rounds=2).digest


def test_the_two_differ() -> None:
    assert small_run("fedmix", {}).digest != small_run("naivemix", {}).digest


def visit(experiment: BuiltRun, client: int) -> ClientUpdate:
    companion = experiment.rounds.parts.extras
    jobs = experiment.rounds.parts.server.dispatch(0, [client])
    (update,) = experiment.engine.train(
        in_round(0, [ClientTask(j.client_id, j.row, j.model_index, companion.send_to_client(0, client)) for j in jobs])
    )
    assert isinstance(update, ClientUpdate), update
    return update


def test_a_client_shares_the_mean_of_its_samples_and_labels() -> None:
    with build_small_run("fedmix", {}).engine_closed() as experiment:
        update, samples = visit(experiment, 2), experiment.data.federated_data.client_samples(2)
        torch.testing.assert_close(update.extras["x"][0], samples.x.mean(0), rtol=1e-4, atol=1e-5)
        shares = F.one_hot(samples.y, 10).float().mean(0)
        torch.testing.assert_close(update.extras["y"][0], shares, rtol=1e-4, atol=1e-6)
        assert update.extras["count"].tolist() == [len(samples)]


@pytest.mark.parametrize("size", [2, 3, 10, 11])
def test_groups_share_the_samples_evenly_and_empty_ones_are_left_out(size: int) -> None:
    with build_small_run("fedmix", {"fedmix": {"groups": 3}}).engine_closed() as experiment:
        experiment.engine.context.data._clients = SmallFederatedDataset(sizes={2: size})._clients
        update, companion = visit(experiment, 2), experiment.rounds.parts.extras
        samples, counts = experiment.engine.context.data.client_samples(2), update.extras["count"]
        assert counts.sum() == len(samples) == size
        assert counts.max() - counts.min() <= 1
        whole = (counts[:, None] * update.extras["x"]).sum(0) / counts.sum()
        torch.testing.assert_close(whole, samples.x.mean(0), rtol=1e-4, atol=1e-5)
        companion.receive_update(0, update)
        companion.receive_update(0, update)
        assert companion.owners == [2] * min(size, 3), "each client is in the pool once"
        pool = companion.send_to_client(1, 0)
        torch.testing.assert_close(pool["y"].sum(1), torch.ones(min(size, 3)))


def bilinear(output: Tensor, y: Tensor) -> Tensor:
    """A loss that is linear in the output: with a linear network, affine in the input."""
    return (output * y).sum(1).mean()


def test_for_an_affine_loss_it_is_mixup_to_first_order() -> None:
    torch.manual_seed(0)
    f, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.randn(4, 3)
    x_, y_ = torch.randn(1, 5), torch.randn(1, 3).expand(4, -1)

    def mixup(lam: float) -> Tensor:
        output = f((1 - lam) * x + lam * x_)
        return (1 - lam) * bilinear(output, y) + lam * bilinear(output, y_)

    gaps = {}
    for lam in (0.2, 0.02):
        gaps[lam] = (mixup(lam) - fedmix_loss(f, bilinear, Batch(x, y), x_, y_, lam)).item()
        # What is left over is lambda^2 times the slope of CE(., y_) - CE(., y) along x_.
        rest = lam**2 * (x_ @ f.weight.T * (y_ - y)).sum(1).mean().item()
        assert gaps[lam] == pytest.approx(rest, rel=1e-3, abs=1e-6)
    assert gaps[0.2] != pytest.approx(0, abs=1e-4)


def test_a_batch_counts_the_same_however_often_it_is_repeated() -> None:
    """The derivative of a mean loss is not averaged a second time."""
    f, x, y = simple_network(), torch.randn(4, 64), torch.arange(4)
    x_, y_ = torch.randn(1, 64), torch.full((1, 10), 0.1)
    losses = [
        fedmix_loss(f, F.cross_entropy, Batch(x.repeat(n, 1), y.repeat(n)), x_, y_.expand(4 * n, -1), 0.1)
        for n in (1, 5)
    ]
    torch.testing.assert_close(losses[0], losses[1])


def test_the_gradient_goes_through_the_taylor_term() -> None:
    f, x, y = simple_network().double(), torch.randn(3, 64).double(), torch.arange(3)
    x_, y_ = torch.randn(1, 64).double(), torch.full((3, 10), 0.1).double()
    weight, at, step = f[0].weight, (2, 7), 1e-6

    def loss() -> Tensor:
        return fedmix_loss(f, F.cross_entropy, Batch(x, y), x_, y_, 0.3)

    (gradient,) = torch.autograd.grad(loss(), weight)
    with torch.no_grad():
        weight[at] += step
    above = loss().detach()
    with torch.no_grad():
        weight[at] -= 2 * step
    assert float((above - loss().detach()) / (2 * step)) == pytest.approx(float(gradient[at]), rel=1e-4)


def test_naive_mixing_changes_the_inputs_and_both_labels() -> None:
    with build_small_run("naivemix", {"naivemix": {"lam": 0.25}}, model=simple_network).engine_closed() as experiment:
        bench, local, samples = (
            experiment.engine._trainer,
            experiment.rounds.parts.client,
            experiment.data.federated_data.client_samples(1),
        )
        row = experiment.layout.empty()
        uploads = {name: torch.zeros(shape) for name, shape in local.upload_shapes(experiment.layout).items()}
        task = ClientTask(1, experiment.rounds.context.initial.clone(), round=0)
        bench.start_task(task, TaskMemory(row, {}, uploads), samples)
        x_, y_ = torch.randn(1, 64), torch.full((4, 10), 0.1)
        batch = Batch(samples.x[:4], samples.y[:4])
        soft = 0.75 * F.one_hot(batch.y, 10) + 0.25 * y_
        expected = F.cross_entropy(bench.module(0.75 * batch.x + 0.25 * x_), soft)
        torch.testing.assert_close(local.mixed(bench, batch, x_, y_), expected)


def test_the_pool_grows_with_the_clients_seen_and_is_counted_in_bytes() -> None:
    with build_small_run("fedmix", {}, model=batch_norm_network).engine_closed() as experiment:
        first, second = (experiment.rounds.run_round(number) for number in range(2))
        size, mean = experiment.layout.nbytes, 4 * (64 + 10)
        assert first["bytes_down"] == 4 * size
        assert second["bytes_down"] == 4 * (size + 4 * mean)
        assert first["bytes_up"] == 4 * (size + mean + 4)
        owners = experiment.rounds.parts.extras.owners
        assert len(owners) == len(set(owners)) > 4


@pytest.mark.parametrize("name", NAMES)
def test_each_step_mixes_with_one_of_all_means_and_its_own_labels(name: str) -> None:
    with build_small_run(name, {}, clients_per_round=8, epochs=30).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        local, pool, seen = experiment.rounds.parts.client, experiment.rounds.parts.extras.send_to_client(1, 2), []
        mixed = local.mixed
        local.mixed = lambda bench, batch, x_, y_: (seen.append((len(batch), x_, y_)), mixed(bench, batch, x_, y_))[1]
        update = visit(experiment, 2)
        assert len(seen) == update.steps > 50
    drawn = set()
    for size, x_, y_ in seen:
        (which,) = (pool["x"] == x_).all(1).nonzero().flatten().tolist()
        assert torch.equal(y_, pool["y"][which].expand(size, -1))
        drawn.add(which)
    assert drawn == set(range(8))


@pytest.mark.exhaustive
def test_a_pool_of_small_groups_keeps_the_contract() -> None:
    check_method("fedmix", {"fedmix": {"groups": 3, "lam": 0.2}})


def test_data_without_classes_are_refused() -> None:
    federation = SmallFederatedDataset()
    federation.classes = 0
    with pytest.raises(InputError, match="no classes"):
        small_run("fedmix", {}, federated_data=federation)
