"""Tests of FedMA layer by layer: frozen and trained layers, growing layers."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import ClientUpdate, Layout
from fedloom.core.bank import Bank
from fedloom.core.layout import TensorKind
from fedloom.errors import InputError
from fedloom.methods import MethodContext
from fedloom.methods.fedma_layers import FedMALayersOptions, FedMALayersServer, fedma_layer_columns, fedma_layer_stages
from fedloom.methods.matching.alignment import AlignmentPrior, find_growing_alignment
from fedloom.methods.matching.symmetries import find_symmetries
from fedloom.models.registry import build_model
from fedloom.testing import check_method
from fedloom.testing.fixtures import batch_norm_network, build_small_run
from tests.support.task_rounds import in_round

CLASSES = 10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are tiny here, and threads that wait for each other on a busy machine take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@lru_cache(maxsize=1)
def some_context() -> MethodContext:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def make(module: nn.Module, clients: int = 3, shape: tuple[int, ...] = (6,), **options: Any) -> FedMALayersServer:
    layout = Layout.of(module)
    context = replace(
        some_context(),
        layout=layout,
        initial=layout.read(module),
        clients_per_round=clients,
        make_model=lambda: deepcopy(module),
        shape=shape,
        classes=CLASSES,
        num_examples=lambda client_id: 9 - client_id,
        server=replace(some_context().server, make_bank=Bank.memory),
    )
    return FedMALayersServer(context, FedMALayersOptions(**options))


def play(server: FedMALayersServer, rounds: range, change: Any = lambda slot, row: row, counts: Any = None) -> None:
    """Rounds in which the client of slot i turns its row into change(i, row)."""
    for round in rounds:
        updates = []
        for job in server.dispatch(round, list(range(server.context.clients_per_round))):
            extras = {"counts": torch.tensor(counts[job.model_index])} if counts else {}
            updates.append(
                ClientUpdate(job, change(job.model_index, job.row.clone()), 9 - job.client_id, 1.0, 1, extras)
            )
        server.aggregate(round, iter(updates))


def test_a_pass_puts_permuted_clients_back() -> None:
    torch.manual_seed(0)
    module = perceptron()
    server = make(module)
    row = server.bank.rows[0].clone()
    draw = torch.Generator().manual_seed(1)
    copies = [row, *(server._symmetries.permuted(row, server._symmetries.random(draw)) for _ in range(2))]
    assert server.length == 3
    play(server, range(1), lambda slot, _: copies[slot])
    assert torch.equal(server.global_model(), row)  # the last pass's, which is the beginning
    first = fedma_layer_columns(server.context.layout, server._stage, 0, 1)
    for slot in server.client_models.rows:
        assert torch.equal(slot[: len(first)][first], row[: len(first)][first])
    assert not torch.equal(server.client_models.rows[0], server.client_models.rows[1])
    server.bank.rows[0] = 0
    play(server, range(1, 3))
    assert torch.equal(server.global_model(), row)


def test_a_pass_puts_a_permuted_resnet_back() -> None:
    torch.manual_seed(0)
    server = make(build_model("resnet20:shortcut=B,width=4", (1, 8, 8), CLASSES), clients=2, shape=(1, 8, 8))
    layout, row = server.context.layout, server.bank.rows[0].clone()
    row[: layout.floats] += 0.1 * torch.rand(layout.floats)
    copy = server._symmetries.permuted(row, server._symmetries.random(torch.Generator().manual_seed(1)))
    play(server, range(1), lambda slot, _: (row, copy)[slot])
    play(server, range(1, server.length))
    assert server.length == 13
    assert torch.equal(server.global_model(), row)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (6,)),
    "cnn with flatten": (lambda: build_model("lenet", (1, 28, 28), CLASSES), (1, 28, 28)),
    "resnet": (lambda: build_model("resnet20:shortcut=B,width=4", (1, 8, 8), CLASSES), (1, 8, 8)),
    "resnet with padded shortcuts": (lambda: build_model("resnet20:width=4", (1, 8, 8), CLASSES), (1, 8, 8)),
}


def among(size: int, of: int, draw: torch.Generator) -> Tensor:
    """A permutation of the first `size` of so many units."""
    return torch.cat([torch.randperm(size, generator=draw), torch.arange(size, of)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "gamma"), [(1.0, 7.0), (0.5, 1e-9), (0.5, 7.0)], ids=["fixed", "grown", "growing"])
def test_a_pass_puts_permuted_clients_of_every_kind_back(kind: str, start: float, gamma: float) -> None:
    """Exactly, where no neuron is opened. Where some are, the network is another one that computes the same."""
    torch.manual_seed(0)
    module, shape = KINDS[kind][0](), KINDS[kind][1]
    server = make(module, clients=3, shape=shape, start=start, gamma=gamma)
    layout, row = server.context.layout, server.bank.rows[0]
    for entry in layout.entries:  # statistics and biases that tell units apart
        if entry.kind is TensorKind.BUFFER:
            entry.view(row).add_(0.1 * torch.rand(entry.shape))
    draw, groups = torch.Generator().manual_seed(1), server._symmetries.groups
    orders = [[among(size, g.size, draw) for size, g in zip(server._sizes, groups, strict=True)] for _ in range(2)]
    copies = [row.clone(), *(server._symmetries.permuted(row, each) for each in orders)]
    assert not torch.equal(copies[1], copies[2])
    before = output(module, row, shape)
    play(server, range(1), lambda slot, _: copies[slot].clone())
    play(server, range(1, server.length))
    if start == 1 or gamma < 1:
        assert torch.equal(server.global_model(), copies[0])
    else:
        assert server.diagnostics()["units"] > sum(server._sizes)
    torch.testing.assert_close(output(module, server.global_model(), shape), before, rtol=1e-4, atol=1e-5)


def test_a_norm_rests_with_the_convolution_before_it() -> None:
    module = build_model("resnet20:shortcut=B,width=4", (1, 8, 8), CLASSES)
    layout = Layout.of(module)
    symmetries = find_symmetries(module, layout, (1, 8, 8))
    order = fedma_layer_stages(layout, symmetries)
    stage = {entry.name: order[entry.offset] for entry in layout.entries}
    assert stage["conv1.weight"] == stage["norm1.running_mean"] == 0
    assert stage["body.layer1.0.conv1.weight"] == stage["body.layer1.0.norm1.weight"] == 1
    assert stage["body.layer1.0.conv2.weight"] == stage["body.layer1.0.norm2.running_var"] == 1
    assert stage["body.layer1.2.conv2.weight"] == stage["body.layer1.2.norm2.weight"] == 3
    assert stage["head.weight"] == stage["head.bias"] == len(symmetries.groups)


def test_the_same_clients_stay_for_a_pass() -> None:
    server = make(perceptron(), clients=4)
    chosen = [server.sample_clients(round) for round in range(6)]
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[3] == chosen[4] == chosen[5]
    assert chosen[0] != chosen[3]


def test_matched_layers_rest_while_the_others_train() -> None:
    options = {"fedma-layers": {}}
    with build_small_run("fedma-layers", options, momentum=0.9, weight_decay=0.1).engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        assert isinstance(server, FedMALayersServer)
        clients = server.sample_clients(0)
        for round in (0, 1):
            rests = fedma_layer_columns(layout, server._stage, 0, round)
            jobs = list(server.dispatch(round, clients))
            updates = []
            for update in experiment.engine.train(in_round(round, jobs)):
                before, after = update.task.row[: layout.floats], update.row[: layout.floats]
                assert torch.equal(before[rests], after[rests])
                assert not torch.equal(before[~rests], after[~rests])
                assert float(update.extras["counts"].sum()) == update.num_examples
                updates.append(replace(update, row=update.row.clone(), extras={}))
            zeros = sum(entry.gap for entry in layout.entries)  # before the statistics of its norm
            assert int(rests.sum()) == (0 if round == 0 else 64 * 16 + 5 * 16 + zeros)
            server.aggregate(round, iter(updates))


def test_a_layer_that_rests_does_so_in_every_step() -> None:
    """And is not just put back at the end: the layers behind it must learn with it as it is."""
    with build_small_run("fedma-layers", {}, momentum=0.9, weight_decay=0.1).engine_closed() as experiment:
        server, local, layout = experiment.rounds.parts.server, experiment.rounds.parts.client, experiment.layout
        assert isinstance(server, FedMALayersServer)
        experiment.rounds.run_round(0)
        rests = fedma_layer_columns(layout, server._stage, 0, 1)[: layout.trainable]
        step, seen = local.training_step, []
        local.training_step = lambda bench, batch: (step(bench, batch), seen.append(bench.weights.clone()))[0]
        (job, *_) = server.dispatch(1, server.sample_clients(1))
        (update,) = experiment.engine.train(in_round(1, [job]))
        received = job.row[: layout.trainable]
        assert len(seen) == update.steps > 1
    assert rests.any()
    assert all(torch.equal(weights[rests], received[rests]) for weights in seen)
    assert all(not torch.equal(weights[~rests], received[~rests]) for weights in seen)


def test_classes_count_by_who_has_them() -> None:
    torch.manual_seed(0)
    server = make(perceptron(), clients=2)
    counts = [[4.0, 1.0, 0.0] + [1.0] * 7, [0.0, 3.0, 0.0] + [1.0] * 7]
    head = server.context.layout.entries[-1]

    def shift(slot: int, row: Tensor) -> Tensor:
        head.view(row).fill_(float(slot))
        return row

    play(server, range(3), shift, counts)
    mean = head.view(server.global_model())
    # Nobody has class 2: there clients count by their samples, 9 and 8.
    torch.testing.assert_close(mean[:4], torch.tensor([0.0, 0.75, 8 / 17, 0.5]))


def test_a_layer_that_nobody_answered_for_is_matched_with_the_next() -> None:
    torch.manual_seed(0)
    server = make(perceptron())
    row = server.bank.rows[0].clone()
    draw = torch.Generator().manual_seed(1)
    copies = [row, *(server._symmetries.permuted(row, server._symmetries.random(draw)) for _ in range(2))]
    list(server.dispatch(0, [0, 1, 2]))
    server.aggregate(0, iter([]))
    assert server.done == 0
    play(server, range(1, 2), lambda slot, _: copies[slot])
    assert server.done == 2
    play(server, range(2, 3))
    assert torch.equal(server.global_model(), row)


# Growing


def output(module: nn.Module, row: Tensor, shape: tuple[int, ...] = (6,)) -> Tensor:
    copy = deepcopy(module)
    Layout.of(copy).bind(copy, row.clone())
    x = torch.rand(7, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        result: Tensor = copy.eval()(x)
    return result


@pytest.mark.parametrize("gamma", [1e-9, 7.0])
def test_equal_clients_grow_into_a_network_of_the_same_function(gamma: float) -> None:
    torch.manual_seed(0)
    module = perceptron()
    server = make(module, start=0.5, gamma=gamma)
    small = server.global_model().clone()
    assert float(server.diagnostics()["units"]) == 10
    play(server, range(3))
    units = server.diagnostics()["units"]
    torch.testing.assert_close(output(module, server.global_model()), output(module, small))
    if gamma < 1:
        assert units == 10
        assert torch.equal(server.global_model(), small)
    else:
        assert 10 < units <= 20
    # In the next pass a client has as many units as it began with, and what it has not is zero.
    jobs = list(server.dispatch(3, [0, 1, 2]))
    first = server.context.layout.entries[0]
    for job in jobs:
        assert int(first.view(job.row).abs().sum(1).count_nonzero()) == 6


def test_gains_are_those_of_the_formula() -> None:
    u, total = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    gains = AlignmentPrior(sigma=1, sigma0=1, gamma=7).gains(u, total, torch.tensor([2.0]), clients=4, new=2)
    # s = s0 = 1, G = (2, 0), S = 3: |u + G|^2 / 4 - |G|^2 / 3 + log(2 / 2), and |u|^2 / 2 + 2 log(7 / 4) - 2 log e.
    expected = [13 / 4 - 4 / 3, 5 / 2 + 2 * log(7 / 4), 5 / 2 + 2 * log(7 / 4) - 2 * log(2)]
    torch.testing.assert_close(gains[0], torch.tensor(expected, dtype=torch.float64))
    # With mu0 = (0, 1) and s0 = 4: G = (2, 4), S = 6, |u + G|^2 / 7 - |G|^2 / 6, and |u + (0, 4)|^2 / 5 - 16 / 4 + ...
    mean = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gains = AlignmentPrior(sigma=1, sigma0=0.5, gamma=7, mu0=mean).gains(
        u, total, torch.tensor([2.0]), clients=4, new=1
    )
    expected = [(9 + 36) / 7 - 20 / 6, 37 / 5 - 4 + 2 * log(7 / 4)]
    torch.testing.assert_close(gains[0], torch.tensor(expected, dtype=torch.float64))
    # A neuron of 14 of 16 clients counts as one of ten in the logarithm, and only there: G = (2, 0), S = 15.
    gains = AlignmentPrior(sigma=1, sigma0=1, gamma=7).gains(u, total, torch.tensor([14.0]), clients=16, new=0)
    torch.testing.assert_close(gains[0], torch.tensor([13 / 16 - 4 / 15 + log(10 / 6)], dtype=torch.float64))
    everyone = AlignmentPrior(1, 1, 7).gains(u, total, torch.tensor([40.0]), clients=3, new=0)
    assert bool(torch.isfinite(everyone).all())


def test_biases_are_expected_around_another_mean_than_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(vectors: Any, first: Any, width: int, prior: AlignmentPrior, *others: Any) -> Any:
        seen.append(prior.mu0)
        return find_growing_alignment(vectors, first, width, prior, *others)

    monkeypatch.setattr("fedloom.methods.fedma_layers.find_growing_alignment", noted)
    torch.manual_seed(0)
    play(make(perceptron(), start=0.5, bias0=0.25), range(2))
    assert [mean.tolist() for mean in seen] == [[0.0] * 6 + [0.25], [0.0] * 12 + [0.25]]


def test_neurons_that_differ_open_new_places_and_equal_ones_do_not() -> None:
    a = 10 * torch.eye(3, 8, dtype=torch.float64)
    b = 10 * torch.eye(8, dtype=torch.float64)[[2, 5, 6]]
    places = find_growing_alignment(
        [a, b], torch.tensor([1, 4, 7]), 8, AlignmentPrior(1, 1, 1), 5, np.random.default_rng(0)
    )
    assert places[0].tolist() == [1, 4, 7]
    assert places[1][0] == 7
    assert len({*places[0].tolist(), *places[1].tolist()}) == 5
    full = find_growing_alignment([a, b], torch.arange(3), 4, AlignmentPrior(1, 1, 1), 5, np.random.default_rng(0))
    assert len({*full[0].tolist(), *full[1].tolist()}) <= 4
    assert all(len(set(each.tolist())) == 3 for each in full)


def test_layers_that_are_normalised_together_cannot_grow() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES))
    with pytest.raises(InputError, match="the layer '0' cannot grow"):
        make(module, start=0.5)
    make(module)


@pytest.mark.exhaustive
def test_a_growing_run_keeps_the_contract() -> None:
    check_method("fedma-layers", {"fedma-layers": {"start": 0.5}})


def test_units_that_a_client_has_not_stay_zero_in_its_training() -> None:
    options = {"fedma-layers": {"start": 0.5}}
    with build_small_run("fedma-layers", options, model=batch_norm_network).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        assert isinstance(server, FedMALayersServer)
        group = server._symmetries.groups[0]
        for update in experiment.engine.train(in_round(0, list(server.dispatch(0, server.sample_clients(0))))):
            numbers = group.vectors(update.row, [tie for tie in group.ties if tie.entry.kind is TensorKind.PARAMETER])
            assert float(numbers[8:].abs().max()) == 0
            assert bool((numbers[:8].abs().sum(1) > 0).all())
