"""Tests of names, compositions and options of methods."""

import pytest

from fedloom.errors import InputError
from fedloom.methods import Client, Method, Options, compose, methods, register
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.fedprox import FedProxClient


def test_parts_that_nobody_brings_are_fedavgs() -> None:
    composition = compose("fedprox")
    assert composition.owner("server").server is FedAvgServer
    assert composition.owner("client").client is FedProxClient
    assert composition.owner("extras") is None


def test_fedavg_beside_another_adds_nothing() -> None:
    assert compose("fedavg+fedprox").methods == compose("fedprox").methods


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fedprx", "did you mean 'fedprox'"),
        ("fedprox+scaffold", "fedprox and scaffold both provide the part 'client'"),
        ("fedprox+fedprox", "twice"),
        ("fedprox+", "unknown method ''"),
        ("", "unknown method ''"),
    ],
)
def test_what_cannot_be_composed_is_refused_with_a_reason(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        compose(name)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fedprox": {"mo": 1}}, "did you mean 'mu'"),
        ({"fedprox": {"mu": -1}}, "fedprox.mu must be greater than or equal to 0, not -1"),
        ({"fedprox": {"mu": "much"}}, "fedprox.mu must be a number, not 'much'"),
        ({"scaffold": {"option": "I"}}, "options of 'scaffold' were given, but the method is 'fedprox'"),
        ({"fedpro": {"mu": 1}}, "unknown method 'fedpro'"),
        ({"fedavg": {"weighting": "equal"}}, "'samples' or 'uniform'"),
    ],
)
def test_wrong_options_are_named(given: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        compose("fedprox", given)


def test_a_method_sets_defaults_of_the_parts_it_leans_on_and_the_user_overrides_them() -> None:
    assert compose("scaffold").options["fedavg"].weighting == "uniform"
    assert compose("scaffold", {"fedavg": {"weighting": "samples"}}).options["fedavg"].weighting == "samples"
    assert compose("fedprox").options["fedavg"].weighting == "samples"


def test_ours_cannot_be_replaced_but_ones_own_can() -> None:
    mine = Method("mine", "a test", "nobody", client=Client)
    assert register(mine) is mine
    register(Method("mine", "a better one", "nobody", client=Client))
    assert methods()["mine"].summary == "a better one"
    with pytest.raises(InputError, match="already a method 'fedavg'"):
        register(Method("fedavg", "x", "y", client=Client))
    with pytest.raises(InputError, match="letters, digits"):
        register(Method("a+b", "x", "y", client=Client))


def test_every_option_in_force_is_stated() -> None:
    assert compose("fedprox", {"fedprox": {"mu": 0.5}}).resolved_options() == {
        "fedavg": {"weighting": "samples", "server_lr": 1.0},
        "fedprox": {"mu": 0.5},
    }


def test_methods_of_installed_packages_are_found_and_broken_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        value = "package.module"

        def __init__(self, load) -> None:
            self.load = load

    def loads() -> None:
        register(Method("installed", "a test", "nobody", client=Client))

    def breaks() -> None:
        raise ImportError("no such thing")

    monkeypatch.setattr("fedloom.methods.registry._installed", False)
    monkeypatch.setattr("fedloom.methods.registry.entry_points", lambda group: [Point(loads)])
    assert "installed" in methods()
    monkeypatch.setattr("fedloom.methods.registry._installed", False)
    monkeypatch.setattr("fedloom.methods.registry.entry_points", lambda group: [Point(breaks)])
    with pytest.raises(InputError, match=r"package\.module.*no such thing"):
        methods()


def test_a_method_without_options_says_so() -> None:
    class Bare(Options):
        pass

    register(Method("bare", "a test", "nobody", options=Bare, client=Client))
    with pytest.raises(InputError, match=r"bare has no options, so bare\.x cannot be set"):
        compose("bare", {"bare": {"x": 1}})


def test_options_of_a_server_that_takes_no_part_are_refused_and_not_stated() -> None:
    class Other(FedAvgServer):
        pass

    register(Method("other", "a test", "nobody", options=FedAvgOptions, server=Other))
    with pytest.raises(InputError, match="the server is other's"):
        compose("other+scaffold", {"fedavg": {"weighting": "uniform"}})
    assert set(compose("other+scaffold").resolved_options()) == {"other", "scaffold"}
