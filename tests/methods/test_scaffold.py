"""SCAFFOLD: its invariants, and what it is for."""

import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.data import Federation, Samples
from fedloom.errors import InputError
from fedloom.testing import small_experiment, small_run


class Quadratics(Federation):
    """Client k has f_k(v) = mean over its samples of |a (v - b)|^2 / 2, with a, b of its own."""

    classes = 0
    shape = (2,)
    name = "quadratics"
    slopes = torch.tensor([[1.0, 0.5], [2.0, 1.0], [0.5, 3.0]])
    optima = torch.tensor([[1.0, -1.0], [-2.0, 3.0], [4.0, 0.0]])

    def __len__(self) -> int:
        return 3

    def client(self, k: int) -> Samples:
        x = self.slopes[k].repeat(4, 1)
        return Samples(x, x * self.optima[k])

    def minimiser(self) -> Tensor:
        curvature = self.slopes**2
        return (curvature * self.optima).sum(0) / curvature.sum(0)


class Point(nn.Module):
    """The model is the point v itself."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.v


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean() / 2


@pytest.mark.parametrize("option", ["I", "II"])
def test_it_reaches_the_minimiser_that_fedavg_misses(option: str, tmp_path) -> None:
    federation = Quadratics()
    settings = {"rounds": 200, "epochs": 10, "batch_size": 0, "lr": 0.05, "loss": half_square, "engine": "plain"}

    def solve(method: str, **more: object) -> Tensor:
        out = tmp_path / method
        return fedloom.run(method, federation, Point, out=out, report=False, **settings, **more).model().v.detach()

    wanted = federation.minimiser()
    with_control = solve("scaffold", options={"scaffold": {"option": option}})
    without = solve("fedavg", options={"fedavg": {"weighting": "uniform"}})
    assert torch.allclose(with_control, wanted, atol=1e-4), (with_control, wanted)
    assert (without - wanted).norm() > 0.1


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_the_servers_variate_is_the_mean_of_all_clients(option: str, lost: float) -> None:
    settings = {"rounds": 5, "lost": lost, "weight_decay": 0.01}
    with small_experiment("scaffold", {"scaffold": {"option": option}}, **settings).engine_closed() as experiment:
        for number in range(5):
            experiment.rounds.play(number)
            homes = experiment.engine.homes
            total = sum(homes.get(client)["c"].double() for client in homes.clients())
            c = experiment.rounds.parts.companion.c.double()
            torch.testing.assert_close(c, total / len(experiment.federation), rtol=1e-5, atol=1e-7)
        assert len(homes) > 4
        assert c.norm() > 0


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_fedavg_with_uniform_weights(option: str) -> None:
    first = small_run("scaffold", {"scaffold": {"option": option}}, rounds=1)
    assert first.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, rounds=1).digest
    later = small_run("scaffold", {"scaffold": {"option": option}}, rounds=2)
    assert later.digest != small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, rounds=2).digest


def test_option_two_is_the_mean_of_the_gradients_that_were_used() -> None:
    with small_experiment("scaffold", {}, epochs=2, lr=0.05).engine_closed() as experiment:
        local, engine = experiment.rounds.parts.local, experiment.engine
        gradients: list[Tensor] = []
        plain = type(local).correct

        def note(bench: fedloom.Bench) -> None:
            gradients.append(bench.gradient.clone())
            plain(local, bench)

        local.correct = note
        extras = experiment.rounds.parts.companion.send(0, 2)
        (job,) = experiment.rounds.parts.server.dispatch(0, [2])
        (update,) = engine.train(0, [fedloom.Job(job.client, job.row, job.slot, extras)])
        mean = torch.stack(gradients).mean(0)
        torch.testing.assert_close(update.home["c"], mean, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(update.extras["delta_c"], mean, rtol=1e-3, atol=1e-5)


def test_momentum_lengthens_the_way_and_is_taken_out_again() -> None:
    """On a slope that never changes the variate must be that slope, whatever the momentum."""
    for momentum in (0.0, 0.5, 0.9):
        way = steps = 400
        velocity = gone = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1.0
            gone += velocity
        assert gone * (1 - momentum) / way == pytest.approx(1.0, rel=0.03)


def test_a_refused_update_leaves_the_clients_variate_alone() -> None:
    from fedloom.testing import SmallFederation

    finished = small_run("scaffold", {}, federation=SmallFederation(poisoned=3), per_round=8)
    assert all("3" in record["lost_clients"] for record in finished.records)


def test_adam_needs_option_one() -> None:
    with pytest.raises(InputError, match="option I"):
        small_run("scaffold", {}, optimizer="adam")
    small_run("scaffold", {"scaffold": {"option": "I"}}, optimizer="adam", lr=0.01)
