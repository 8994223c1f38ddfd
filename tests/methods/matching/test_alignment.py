"""Tests of FedMA and GAMF: permuted units are restored exactly.

Ordered units stay, and nothing else changes.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import ClientTask, ClientUpdate, Layout
from fedloom.core.bank import Bank
from fedloom.core.layout import TensorKind
from fedloom.core.similarity import pairwise_squared_distances
from fedloom.errors import InputError
from fedloom.methods import MethodContext
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.fedma import FedMAOptions, FedMAServer, fedma_incoming_weights, match_fedma_neurons
from fedloom.methods.gamf import (
    GAMFEdgeWeights,
    GAMFOptions,
    GAMFServer,
    gamf_graduated_assignment,
    gamf_l4_distances,
    gamf_sinkhorn,
)
from fedloom.methods.matching.alignment import AlignmentServer, align_units_by_cost
from fedloom.models.registry import build_model
from fedloom.testing.fixtures import batch_norm_network, build_small_run, small_run

SERVERS: dict[str, tuple[type[AlignmentServer[Any]], type[Any]]] = {
    "fedma": (FedMAServer, FedMAOptions),
    "gamf": (GAMFServer, GAMFOptions),
}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), (9,)),
    "batch norm": (batch_norm_network, (64,)),
    "cnn with flatten": (lambda: build_model("lenet", (1, 28, 28), 10), (1, 28, 28)),
    "resnet": (lambda: build_model("resnet20:shortcut=B,width=4", (1, 8, 8), 10), (1, 8, 8)),
    "resnet with padded shortcuts": (lambda: build_model("resnet20:width=4", (1, 8, 8), 10), (1, 8, 8)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are tiny here, and threads that wait for each other on a busy machine take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=1)
def some_context() -> MethodContext:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


@lru_cache(maxsize=1)
def network(name: str) -> tuple[nn.Module, Layout, Tensor]:
    """A network with random weights and statistics, its layout and its row."""
    torch.manual_seed(0)
    module = NETWORKS[name][0]()
    layout = Layout.of(module)
    row = layout.read(module)
    for entry in layout.entries:
        if entry.kind is not TensorKind.INTEGER and len(entry.shape) == 1:
            entry.view(row).add_(0.1 * torch.rand(entry.shape))
    return module, layout, row


def make(method: str, name: str, **options: Any) -> Any:
    """A server for a network, whose own model is unlike those that come."""
    module, layout, row = network(name)
    context = replace(
        some_context(),
        layout=layout,
        initial=row + 0.0,
        make_model=lambda: deepcopy(module),
        shape=NETWORKS[name][1],
        server=replace(some_context().server, make_bank=Bank.memory),
    )
    server, kind = SERVERS.get(method, (FedAvgServer, FedAvgOptions))
    return server(context, kind(**options))


def updates(rows: list[Tensor], samples: list[int]) -> list[ClientUpdate]:
    return [
        ClientUpdate(ClientTask(k, row), row, num_examples=n, loss=1.0, steps=1)
        for k, (row, n) in enumerate(zip(rows, samples, strict=True))
    ]


def outputs(name: str, row: Tensor) -> Tensor:
    module, layout, _ = network(name)
    copy = deepcopy(module).double().eval()
    layout64 = Layout.of(copy)
    for entry, other in zip(layout.entries, layout64.entries, strict=True):
        source = entry.view(row)
        copy.state_dict()[other.name].copy_(source)
    x = torch.rand((5, *NETWORKS[name][1]), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        result: Tensor = copy(x)
    return result


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", SERVERS)
def test_permuted_copies_of_a_model_have_it_as_their_mean(method: str, name: str) -> None:
    server = make(method, name)
    row = network(name)[2]
    draw = torch.Generator().manual_seed(1)
    copies = [server._symmetries.permuted(row, server._symmetries.random(draw)) for _ in range(2)]
    assert not torch.equal(copies[0], copies[1])
    server.aggregate(0, iter(updates([copies[0], row, copies[1]], [5, 9, 7])))
    assert torch.equal(server.global_model(), row)
    assert server.diagnostics()["models permuted"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("method", SERVERS)
def test_small_perceptrons_are_recovered_every_time(method: str, seed: int) -> None:
    server, draw = make(method, "mlp"), torch.Generator().manual_seed(100 + seed)
    row = torch.randn(network("mlp")[2].shape, generator=draw) / 3
    copy = server._symmetries.permuted(row, server._symmetries.random(draw))
    server.aggregate(0, iter(updates([copy, row], [5, 9])))
    assert torch.equal(server.global_model(), row)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", SERVERS)
def test_aligned_models_compute_what_they_did(method: str, name: str) -> None:
    """Also where the models are unlike, so that their units really change places."""
    server = make(method, name)
    _, layout, row = network(name)
    noise = torch.Generator().manual_seed(2)
    rows = [row.clone() for _ in range(3)]
    for each in rows[1:]:
        each[: layout.floats] *= 1 + 2 * torch.rand(layout.floats, generator=noise)
        each.copy_(server._symmetries.permuted(each, server._symmetries.random(noise)))
    before = [outputs(name, each) for each in rows]
    old = [each.clone() for each in rows]
    server.align(0, rows, [3.0, 2.0, 1.0])
    assert torch.equal(rows[0], old[0])
    assert not torch.equal(rows[1], old[1])
    for each, expected in zip(rows, before, strict=True):
        torch.testing.assert_close(outputs(name, each), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", SERVERS)
def test_models_that_are_in_order_are_averaged_as_by_fedavg(method: str) -> None:
    _, layout, row = network("batch norm")
    noise = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(4):
        near = row.clone()
        near[: layout.floats] += 1e-3 * torch.rand(layout.floats, generator=noise)
        rows.append(near)
    servers = [make(which, "batch norm") for which in (method, "fedavg")]
    for server in servers:
        server.aggregate(0, iter(updates(rows, [3, 9, 4, 5])))
    assert torch.equal(servers[0].global_model(), servers[1].global_model())


@pytest.mark.parametrize("method", SERVERS)
def test_a_client_without_samples_changes_nothing(method: str) -> None:
    row = network("mlp")[2]
    generator = torch.Generator().manual_seed(4)
    rows = [row + torch.randn(row.shape, generator=generator) for _ in range(3)]
    servers = [make(method, "mlp", weighting=how) for how in ("samples", "uniform") for _ in range(2)]
    for i, server in enumerate(servers):
        given, samples = (rows, [5, 4, 0]) if i % 2 else (rows[:2], [5, 4])
        server.aggregate(0, iter(updates(given, samples)))
    assert torch.equal(servers[0].global_model(), servers[1].global_model())
    assert torch.equal(servers[2].global_model(), servers[3].global_model())
    assert not torch.equal(servers[0].global_model(), servers[2].global_model())


@pytest.mark.parametrize("method", SERVERS)
def test_a_permuted_client_is_brought_back_in_a_run(method: str) -> None:
    """The mean of permuted clients is as good as that of clients in order, where FedAvg's is not."""
    server, plain = make(method, "mlp"), make("fedavg", "mlp")
    row = network("mlp")[2]
    noise = torch.Generator().manual_seed(5)
    rows = [row + 0.01 * torch.randn(row.shape, generator=noise) for _ in range(4)]
    expected = torch.stack(rows).mean(0)
    scrambled = [rows[0], *(server._symmetries.permuted(r, server._symmetries.random(noise)) for r in rows[1:])]
    for each in (server, plain):
        each.aggregate(0, iter(updates(scrambled, [2, 1, 1, 1])))
    weighted = (2 * rows[0] + sum(rows[1:])) / 5
    torch.testing.assert_close(server.global_model(), weighted)
    assert (plain.global_model() - expected).norm() > 10 * (server.global_model() - expected).norm()


def test_networks_that_cannot_be_matched_are_refused_before_anything_runs() -> None:
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.sort(self.a(x)).values)
            return out

    with pytest.raises(InputError, match="model Sorts cannot be matched"):
        small_run("fedma", {}, model=Sorts)


# FedMA


def test_matching_is_the_best_of_all_for_two_models() -> None:
    draw = np.random.default_rng(0)
    a, b = (torch.from_numpy(draw.normal(size=(5, 3))) for _ in range(2))
    order = match_fedma_neurons([a, b], [2.0, 1.0], 5, draw)[1]
    costs = {p: float(((a - b[list(p)]) ** 2).sum()) for p in permutations(range(5))}
    assert tuple(order.tolist()) == min(costs, key=lambda p: costs[p])


@pytest.mark.parametrize("sweeps", [0, 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_matching_is_that_of_a_slow_version_which_weighs_and_tries_all_orders(seed: int, sweeps: int) -> None:
    draw = np.random.default_rng(seed)
    vectors, weights = [draw.normal(size=(4, 2)) for _ in range(4)], [9.0, 4.0, 2.0, 1.0]
    order = np.random.default_rng(seed)
    places: dict[int, tuple[int, ...]] = {0: (0, 1, 2, 3)}

    def matched(k: int) -> tuple[int, ...]:
        others = [n for n in places if n != k]
        mean = sum(weights[n] * vectors[n][list(places[n])] for n in others) / sum(weights[n] for n in others)
        return min(permutations(range(4)), key=lambda p: float(((mean - vectors[k][list(p)]) ** 2).sum()))

    for k in (1 + order.permutation(3)).tolist():
        places[k] = matched(k)
    for _ in range(sweeps):
        before = dict(places)
        for k in order.permutation(4).tolist():
            places[k] = matched(k)
        if places == before:
            break
    back = np.argsort(places[0])
    found = match_fedma_neurons([torch.from_numpy(v) for v in vectors], weights, sweeps, np.random.default_rng(seed))
    assert [each.tolist() for each in found] == [np.array(places[k])[back].tolist() for k in range(4)]


def test_sweeps_never_make_the_matching_worse_and_sometimes_better() -> None:
    better = 0
    for seed in range(10):
        draw = np.random.default_rng(seed)
        vectors = [torch.from_numpy(draw.normal(size=(6, 3))) for _ in range(5)]
        spread = []
        for sweeps in (0, 5):
            orders = match_fedma_neurons(vectors, [1.0] * 5, sweeps, np.random.default_rng(seed))
            assert torch.equal(orders[0], torch.arange(6))
            aligned = torch.stack([v[o] for v, o in zip(vectors, orders, strict=True)])
            spread.append(float(((aligned - aligned.mean(0)) ** 2).sum()))
        assert spread[1] <= spread[0] + 1e-9
        better += spread[1] < spread[0] - 1e-9
    assert better > 0


def test_units_that_are_alike_stay_where_they_are() -> None:
    assert align_units_by_cost(torch.zeros(6, 6)).tolist() == list(range(6))
    dead = torch.zeros(4, 3)
    dead[2] = 1
    assert align_units_by_cost(pairwise_squared_distances(dead, dead)).tolist() == [0, 1, 2, 3]


def test_a_layer_is_matched_by_weights_whose_inputs_are_in_order_already() -> None:
    server = make("fedma", "resnet")
    used = {group.name: {tie.entry.name for tie in ties} for group, ties in fedma_incoming_weights(server._symmetries)}
    stream = used["conv1"]
    assert "conv1.weight" in stream
    assert "norm1.weight" in stream
    assert "body.layer1.0.conv2.weight" not in stream  # its inputs come later
    assert used["body.layer1.0.conv1"] == {f"body.layer1.0.{n}" for n in ("conv1.weight", "norm1.weight", "norm1.bias")}
    assert "body.layer2.0.conv2.weight" in used["body.layer2.0.conv2"]


# GAMF


def test_sinkhorn_gives_rows_and_columns_that_sum_to_one() -> None:
    logits = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperature in (10.0, 1.0, 0.05):
        P = gamf_sinkhorn(logits / temperature, 50_000)
        torch.testing.assert_close(P.sum(0), torch.ones(7, dtype=torch.float64))
        torch.testing.assert_close(P.sum(1), torch.ones(7, dtype=torch.float64), rtol=1e-5, atol=1e-5)
        ratio = P[0, 0] * P[1, 1] / (P[0, 1] * P[1, 0])  # scaling rows and columns leaves it alone
        expected = torch.exp((logits[0, 0] + logits[1, 1] - logits[0, 1] - logits[1, 0]) / temperature)
        torch.testing.assert_close(ratio, expected)
    extreme = gamf_sinkhorn(1e6 * torch.eye(5, dtype=torch.float64)[torch.tensor([2, 0, 1, 4, 3])], 50)
    torch.testing.assert_close(extreme, torch.eye(5, dtype=torch.float64)[torch.tensor([2, 0, 1, 4, 3])])


def test_fourth_norms_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    torch.testing.assert_close(gamf_l4_distances(a, b), torch.cdist(a, b, p=4))
    assert float(gamf_l4_distances(a, a).diagonal().max()) < 1e-3


def test_affinities_are_those_of_the_formula() -> None:
    """Weights into a layer are compared under the matching of the layer before it, weights out of it as they are."""
    server, (_, layout, anchor) = make("gamf", "mlp"), network("mlp")
    noise = torch.Generator().manual_seed(9)
    row = anchor + 0.3 * torch.randn(anchor.shape, generator=noise)
    P = [torch.randn(n, n, generator=noise, dtype=torch.float64).softmax(1) for n in (12, 8)]
    hidden = server._symmetries.groups[1]
    for entry, turned in ((layout.entries[2], False), (layout.entries[4], True)):
        (tie,) = (tie for tie in hidden.ties if tie.entry.offset == entry.offset)
        a, b = (entry.view(each).double() for each in (anchor, row))
        a, b = (a.T, b.T) if turned else (a, b @ P[0].T)
        expected = torch.tensor([[float(((x - y) ** 4).sum() ** 0.25) for y in b] for x in a]).double().mul(-0.5).exp()
        found = GAMFEdgeWeights(server._symmetries, hidden, tie).affinity(anchor, row, P)
        torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-5, atol=1e-6)


def test_sweeps_and_their_temperatures_are_those_of_a_slow_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer with the newest matchings, a temperature for each sweep, Sinkhorn to its end."""

    def affinity(a: Tensor, b: Tensor) -> Tensor:
        A = (-0.5 * torch.cdist(a, b, p=4)).exp()
        return A / A.mean()

    def doubly(logits: Tensor) -> Tensor:
        for _ in range(5000):
            logits = logits - logits.logsumexp(1, keepdim=True)
            logits = logits - logits.logsumexp(0, keepdim=True)
        return logits.exp()

    server, (_, layout, anchor) = (
        make("gamf", "mlp", sweeps=4, temperature=2.0, cooling=0.5, coldest=0.4),
        network("mlp"),
    )
    row = anchor + 0.3 * torch.randn(anchor.shape, generator=torch.Generator().manual_seed(11))
    iterations = []
    monkeypatch.setattr(
        "fedloom.methods.gamf.gamf_sinkhorn", lambda M, n: (iterations.append(n), gamf_sinkhorn(M, n))[1]
    )
    found = gamf_graduated_assignment(server._symmetries, anchor, row, server.options)
    assert iterations == [20, 20, 70, 70, 120, 120, 170, 170]
    (A, B, C), (a, b, c) = ([layout.entries[i].view(each).double() for i in (0, 2, 4)] for each in (anchor, row))
    P, Q = (torch.full((n, n), 1 / n, dtype=torch.float64) for n in (12, 8))
    for temperature in (2.0, 1.0, 0.5, 0.4):
        P = doubly((affinity(A, a) + affinity(B.T, (Q @ b).T)) / temperature)
        Q = doubly((affinity(B, b @ P.T) + affinity(C.T, c.T)) / temperature)
    torch.testing.assert_close(found, [P, Q], rtol=1e-3, atol=1e-5)


def test_soft_matchings_mix_and_hard_ones_do_not() -> None:
    soft, hard = make("gamf", "mlp", output="soft", sweeps=3), make("gamf", "mlp", sweeps=3)
    row = network("mlp")[2]
    other = row + 0.3 * torch.randn(row.shape, generator=torch.Generator().manual_seed(6))
    for P in gamf_graduated_assignment(soft._symmetries, row, other, soft.options):
        torch.testing.assert_close(P.sum(0), torch.ones(len(P), dtype=torch.float64))
        torch.testing.assert_close(P.sum(1), torch.ones(len(P), dtype=torch.float64), rtol=1e-4, atol=1e-4)
        assert float(P.max()) < 0.9
    kept = []
    for server in (soft, hard):
        rows = [row.clone(), other.clone()]
        server.align(0, rows, [1.0, 1.0])
        kept.append(torch.equal(rows[1].sort().values, other.sort().values))
    assert kept == [False, True]


def test_both_sides_of_a_unit_count() -> None:
    """Units with equal incoming weights are told apart by their outgoing ones."""
    server = make("gamf", "mlp")
    layout, row = network("mlp")[1], network("mlp")[2].clone()
    first = layout.entries[0]
    first.view(row)[:] = first.view(row)[0].clone()
    moved = server._symmetries.permuted(row, server._symmetries.random(torch.Generator().manual_seed(8)))
    server.aggregate(0, iter(updates([row, moved], [2, 1])))
    weights = layout.entries[2].view(server.global_model()) - layout.entries[2].view(row)
    assert float(weights.abs().max()) < 1e-6
