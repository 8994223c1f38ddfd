"""Tests of clients that keep momentum or moments between rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.layout import model_digest
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import FederatedDataset
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.errors import InputError
from fedloom.methods import methods
from fedloom.testing import CHECKS
from fedloom.testing.fixtures import SETTINGS, build_small_run, simple_network, small_run
from fedloom.training.optimizers import SGD, Adam
from tests.support import one_client

WAYS = [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "lr": 0.05}]


@pytest.mark.parametrize("way", WAYS)
def test_one_client_is_one_long_training_bit_for_bit(way: dict[str, Any], tmp_path: Path) -> None:
    x, y = torch.randn(30, 64), torch.randint(0, 10, (30,))
    federation = FederatedDataset.from_arrays([(x, y)], test=(x, y), classes=10)
    module = simple_network()
    given = {"rounds": 3, "epochs": 2, "batch_size": 0, "report": False, "engine": "sequential", **way}
    ours = fedloom.run("fedavg", federation, module, out=tmp_path / "run", keep_optimizer=True, **given).model()
    anew = fedloom.run("fedavg", federation, module, out=tmp_path / "anew", **given).model()
    kind = torch.optim.Adam if "optimizer" in way else torch.optim.SGD
    optimizer = kind(module.parameters(), **{name: value for name, value in way.items() if name != "optimizer"})
    one_client.train(module, optimizer, x, y, rounds=3, epochs=2)
    for name, tensor in module.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
        assert not torch.equal(anew.state_dict()[name], tensor), name


@pytest.mark.parametrize("make", [Adam, lambda: SGD(0.9), lambda: SGD(0.5, True, 1e-3)])
@pytest.mark.parametrize("settled", [False, True])
def test_what_one_knew_another_goes_on_with(make: Callable[[], SGD | Adam], settled: bool) -> None:
    gradients = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    whole, weights = torch.ones(9), torch.ones(9)
    lr: Any = torch.tensor(0.1) if settled else 0.1

    def made() -> SGD | Adam:
        optimizer = make()
        if settled:
            optimizer.allocate_state(weights)
        return optimizer

    long, first, second = made(), made(), made()
    for gradient in gradients:
        long.step(whole, gradient.clone(), lr)
    for gradient in gradients[:3]:
        first.step(weights, gradient.clone(), lr)
    known = {name: tensor.clone() for name, tensor in first.state_dict(weights).items()}
    assert {name: tuple(tensor.shape) for name, tensor in known.items()} == first.state_shapes(9)
    second.load_state_dict(known)
    for gradient in gradients[3:]:
        second.step(weights, gradient.clone(), lr)
    assert torch.equal(whole, weights)
    assert all(torch.equal(known[name], kept) for name, kept in first.state_dict(weights).items()), "it was copied"


@pytest.mark.parametrize("make", [Adam, lambda: SGD(0.9)])
def test_one_that_knows_nothing_yet_is_as_good_as_new(make: Callable[[], SGD | Adam]) -> None:
    one, other, gradient = torch.ones(5), torch.ones(5), torch.randn(5)
    blank, new = make(), make()
    blank.load_state_dict({name: tensor.clone() for name, tensor in make().state_dict(one).items()})
    blank.step(one, gradient.clone(), 0.1)
    new.step(other, gradient.clone(), 0.1)
    assert torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_every_engine_keeps_it(way: dict[str, Any]) -> None:
    plain = small_run("fedavg", {}, keep_optimizer=True, **way)
    assert small_run("fedavg", {}, **way).digest != plain.digest
    assert small_run("fedavg", {}, keep_optimizer=True, engine="multiprocess", workers=2, **way).digest == plain.digest
    # Without batch norm: a bias before it has no gradient but rounding, whose sign Adam would follow.
    given: dict[str, Any] = {"keep_optimizer": True, "model": simple_network, **way}
    with build_small_run("fedavg", {}, **given).engine_closed() as experiment:
        experiment.engine = experiment.rounds.engine = CudaEngine(experiment.engine.context, "cpu", 3)
        for number in range(SETTINGS["rounds"]):
            experiment.rounds.run_round(number)
        cuda = experiment.rounds.global_model()
    with build_small_run("fedavg", {}, **given).engine_closed() as experiment:
        for number in range(SETTINGS["rounds"]):
            experiment.rounds.run_round(number)
        torch.testing.assert_close(cuda, experiment.rounds.global_model(), rtol=1e-4, atol=1e-5)


@pytest.mark.quick_if(method=("scaffold", "lss"))
@pytest.mark.parametrize(
    "check",
    ["resumes exactly", "engines agree", "handles failed clients", "handles tiny clients", "leaves inputs alone"],
)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedrep", "lss", "soups", "fedcross"])
def test_methods_keep_their_promises_with_it(method: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "keep_optimizer", True)
    monkeypatch.setitem(SETTINGS, "momentum", 0.5)
    CHECKS[check](method, {})


@pytest.mark.parametrize("method", ["soups", "diwa", "swa", "swad", "lss"])
@pytest.mark.parametrize("way", WAYS)
def test_a_neutral_method_that_trains_in_pieces_is_fedavg_with_it(method: str, way: dict[str, Any]) -> None:
    given: dict[str, Any] = {"keep_optimizer": True, "clients_per_round": 8, **way}
    neutral = methods()[method].neutral
    assert neutral is not None
    assert small_run(method, {method: neutral}, **given).digest == small_run("fedavg", {}, **given).digest


def test_of_a_soup_the_first_model_goes_on_with_it_and_the_others_begin_anew() -> None:
    """What is kept is therefore FedAvg's in the first round, whatever the others do."""
    given: dict[str, Any] = {"keep_optimizer": True, "momentum": 0.5, "model": simple_network, "rounds": 2}
    kept = []
    for method, options in (("fedavg", {}), ("soups", {"models": 3}), ("soups", {"models": 3, "lr_factors": [0.3]})):
        with build_small_run(method, {method: options}, **given).engine_closed() as experiment:
            experiment.rounds.run_round(0)
            homes = experiment.engine.client_states
            kept.append(
                {client: model_digest(homes.get(client)["@optimizer velocity"]) for client in homes.client_ids()}
            )
    assert kept[0] == kept[1] == kept[2]
    assert len(set(kept[0].values())) == len(kept[0]) == 4


def test_of_lss_it_is_the_first_member_too_unless_one_optimiser_trains_them_all() -> None:
    given: dict[str, Any] = {"keep_optimizer": True, "momentum": 0.5, "model": simple_network, "rounds": 2}
    alone = {"include_init": False, "affinity": 0.0, "diversity": 0.0}

    def kept(method: str, **options: Any) -> dict[int, str]:
        with build_small_run(method, {method: options}, **given).engine_closed() as experiment:
            experiment.rounds.run_round(0)
            homes = experiment.engine.client_states
            return {client: model_digest(homes.get(client)["@optimizer velocity"]) for client in homes.client_ids()}

    first = kept("fedavg")
    assert first == kept("lss", models=1, **alone) == kept("lss", models=3, **alone)
    through = kept("lss", models=3, new_optimizer=False, **alone)
    assert all(through[client] != first[client] for client in first)


@pytest.mark.parametrize("way", WAYS)
def test_the_body_of_fedbabu_goes_on_with_it_and_its_fine_tuning_does_not(way: dict[str, Any]) -> None:
    anew, kept = (small_run("fedbabu", {}, keep_optimizer=keep, **way) for keep in (False, True))
    assert anew.digest != kept.digest
    with build_small_run("fedbabu", {}, keep_optimizer=True, **way).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        bench, homes = experiment.engine._trainer, experiment.engine.client_states
        client = homes.client_ids()[0]
        home, start = homes.copy_for(client, torch.device("cpu")), experiment.rounds.global_model()
        samples, row = experiment.data.federated_data.client_samples(client), experiment.layout.empty()
        bench.start_task(ClientTask(client, start, round=1), TaskMemory(row, home, first_visit=False), samples)
        assert all(bool(kept.any()) for kept in bench._stateful_optimizer.state_dict(bench.weights).values())
        next(iter(experiment.rounds.parts.client.personalize(bench)))
        assert not any(bool(kept.any()) for kept in bench._stateful_optimizer.state_dict(bench.weights).values())


def test_a_method_that_makes_new_ones_says_so() -> None:
    for keep in (False, True):
        with build_small_run("fedrep", {}, keep_optimizer=keep, momentum=0.5).engine_closed() as experiment:
            assert any("fedrep creates new optimizers" in note for note in experiment.notes) == keep


def test_sgd_without_momentum_has_nothing_to_keep() -> None:
    with pytest.raises(InputError, match=r"keep_optimizer needs optimizer state: optimizer adam, or a momentum"):
        fedloom.run("fedavg", keep_optimizer=True)
