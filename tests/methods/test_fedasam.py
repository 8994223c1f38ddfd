"""Tests of FedASAM: adaptive radius, and the mean of late models."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientTask, ClientUpdate, TaskMemory
from fedloom.methods.fedasam import FedASAMSwaOptions, fedasam_cycle_position
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from tests.support.task_rounds import in_round


def ascent(v: Tensor, g: Tensor, model: object = simple_network, **options: float) -> Tensor:
    """The way to the worst point from v, with the gradient g."""
    with build_small_run("fedasam", {"fedasam": options}, model=model).engine_closed() as experiment:
        bench, local = experiment.engine._trainer, experiment.rounds.parts.client
        row = experiment.layout.empty()
        samples = experiment.data.federated_data.client_samples(1)
        bench.start_task(ClientTask(1, row.clone(), round=0), TaskMemory(row), samples)
        next(iter(local.train(bench)))
        bench.weights.copy_(v)
        bench.gradient.copy_(g)
        return local.ascent(bench)


def entries(model: nn.Module) -> dict[str, slice]:
    from fedloom.core.layout import Layout

    return {entry.name: entry.columns for entry in Layout.of(model).entries if entry.kind is TensorKind.PARAMETER}


SIZE = sum(p.numel() for p in simple_network().parameters())


def test_the_ascent_is_the_papers() -> None:
    v, g = torch.randn(SIZE), torch.randn(SIZE)
    t = torch.ones(SIZE)
    for name, columns in entries(simple_network()).items():
        if name.endswith("weight"):
            t[columns] = v[columns].abs() + 0.2
    expected = 0.7 * t**2 * g / (t * g).norm()
    torch.testing.assert_close(ascent(v, g), expected, rtol=1e-5, atol=1e-7)


def test_without_eta_a_zero_weight_is_never_moved_and_a_zero_bias_is() -> None:
    v, g = torch.randn(SIZE), torch.randn(SIZE)
    places = entries(simple_network())
    v[places["0.weight"]] = 0.0
    v[places["0.bias"]] = 0.0
    way = ascent(v, g, eta=0.0)
    assert torch.equal(way[places["0.weight"]], torch.zeros_like(way[places["0.weight"]]))
    assert bool((way[places["0.bias"]] != 0).all())
    assert bool((ascent(v, g, eta=0.2)[places["0.weight"]] != 0).all())


def test_scaling_one_weight_up_and_the_next_down_scales_the_ascent_alike() -> None:
    v, g, a = torch.randn(SIZE), torch.randn(SIZE), 8.0
    scale = torch.ones(SIZE)
    places = entries(simple_network())
    scale[places["0.weight"]], scale[places["2.weight"]] = a, 1 / a
    plain, scaled = ascent(v, g, eta=0.0), ascent(v * scale, g / scale, eta=0.0)
    torch.testing.assert_close(scaled, plain * scale, rtol=1e-4, atol=1e-7)


class Recurrent(nn.Module):
    """A network whose weights are called weight_ih_l0 and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])
        return out


def test_weights_of_recurrent_layers_are_weights_too() -> None:
    places = entries(Recurrent())
    size = max(columns.stop for columns in places.values())
    way = ascent(torch.zeros(size), torch.ones(size), Recurrent, eta=0.0)
    moved = {name for name, columns in places.items() if bool(way[columns].any())}
    assert moved == {"lstm.bias_ih_l0", "lstm.bias_hh_l0", "head.bias"}


class Nameless(nn.Module):
    """A network none of whose parameters is called a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 640).view(10, 64))
        self.shift = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.T + self.shift


def test_where_nothing_is_a_weight_it_is_fedsam() -> None:
    own = small_run("fedasam", {"fedasam": {"rho": 0.3}}, model=Nameless)
    assert own.digest == small_run("fedsam", {"fedsam": {"rho": 0.3}}, model=Nameless).digest


@pytest.mark.parametrize("name", ["fedasam", "fedasam-swa"])
def test_without_rho_it_is_fedavg(name: str) -> None:
    start = {"start": 1.0} if name == "fedasam-swa" else {}
    assert small_run(name, {name: {"rho": 0.0, **start}}).digest == small_run("fedavg", {}).digest


def test_no_gradient_no_ascent() -> None:
    assert torch.equal(ascent(torch.randn(SIZE), torch.zeros(SIZE)), torch.zeros(SIZE))


def test_cycles_begin_after_their_share_of_the_rounds_and_end_in_one() -> None:
    options = FedASAMSwaOptions(start=0.75, cycle=2)
    assert [fedasam_cycle_position(round, 8, options) for round in range(8)] == [None] * 6 + [0.5, 1.0]
    assert [fedasam_cycle_position(round, 3, FedASAMSwaOptions(start=0.0, cycle=1)) for round in range(3)] == [1.0] * 3
    assert [fedasam_cycle_position(round, 3, FedASAMSwaOptions(start=0.5, cycle=1)) for round in range(3)] == [
        None,
        None,
        1.0,
    ]
    assert [fedasam_cycle_position(round, 4, FedASAMSwaOptions(start=1.0)) for round in range(4)] == [None] * 4


def swa(**options: float) -> BuiltRun:
    given = {"rho": 0.0, "start": 0.5, "cycle": 2, "lr_end": 0.1, **options}
    return build_small_run("fedasam-swa", {"fedasam-swa": given}, rounds=8)


def test_the_mean_of_models_at_the_ends_of_cycles_is_deployed_and_feeds_nothing() -> None:
    with swa().engine_closed() as experiment:
        server, floats, ends = experiment.rounds.parts.server, experiment.layout.floats, []
        plain = build_small_run("fedavg", {}, rounds=8)
        with plain.engine_closed():
            for number in range(8):
                experiment.rounds.run_round(number)
                plain.rounds.run_round(number)
                w = server.bank.rows[0]
                # The rate ends at the run's own, so the clients train as in FedAvg.
                assert torch.equal(w, plain.rounds.parts.server.global_model())
                if number in (5, 7):
                    ends.append(w[:floats].clone())
                expected = torch.stack(ends).mean(0) if ends else w[:floats]
                torch.testing.assert_close(server.global_model()[:floats], expected, rtol=1e-5, atol=1e-6)
        assert len(ends) == 2
        assert not torch.equal(server.global_model(), server.bank.rows[0])


def test_what_a_refiner_made_of_a_model_is_what_is_averaged() -> None:
    with swa(start=0.0, cycle=1).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        for number, value in enumerate((1.0, 4.0, 7.0)):
            experiment.rounds.run_round(number)
            server.models()[:, 0] = value
            assert server.global_model()[0] == pytest.approx((1.0 + value) / 2)


def test_the_learning_rate_falls_in_each_cycle() -> None:
    with swa(start=0.25, cycle=3, lr_end=0.01).engine_closed() as experiment:
        local, bench, rates = experiment.rounds.parts.client, experiment.engine._trainer, []
        for round in range(8):
            (update,) = experiment.engine.train(
                in_round(round, list(experiment.rounds.parts.server.dispatch(round, [1])))
            )
            assert isinstance(update, ClientUpdate), update
            rates.append(bench.lr)
        assert local.options.lr_end == 0.01
        falling = [0.07, 0.04, 0.01]
        assert rates == pytest.approx([0.1, 0.1, *falling, *falling])


def test_a_rate_below_the_end_is_not_raised() -> None:
    with swa(start=0.0, lr_end=5.0).engine_closed() as experiment:
        (_,) = experiment.engine.train(in_round(1, list(experiment.rounds.parts.server.dispatch(1, [1]))))
        assert experiment.engine._trainer.lr == pytest.approx(0.1)


@pytest.mark.exhaustive
def test_it_keeps_the_contract_while_it_averages() -> None:
    check_method("fedasam-swa", {"fedasam-swa": {"start": 0.0, "cycle": 2}})
