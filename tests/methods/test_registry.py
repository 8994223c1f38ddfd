"""Tests of names, compositions and options of methods."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch import Tensor

from fedloom.errors import InputError
from fedloom.methods import Client, Extras, Method, Options, Refiner, Server, compose, methods, register, registry
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


class NudgeOptions(Options):
    by: float = 0.1
    """size of the nudge"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that a test registers are gone after it."""
    methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))


@pytest.mark.usefixtures("own")
def test_a_class_is_a_method_by_its_decorator() -> None:
    @register("nudge", reference="Doe, 2025", neutral={"by": 0.0})
    class NudgeClient(Client[NudgeOptions]):
        """Nudge the gradient.

        And more about it.
        """

    found = methods()["nudge"]
    assert (found.summary, found.reference, found.year) == ("Nudge the gradient", "Doe, 2025", 2025)
    assert (found.client, found.options, found.parts) == (NudgeClient, NudgeOptions, ("client",))
    assert found.neutral == {"by": 0.0}
    assert compose("nudge", {"nudge": {"by": 2}}).options["nudge"] == NudgeOptions(by=2)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("base", [Server, Client, Extras, Refiner])
def test_every_kind_of_part_can_be_decorated(base: type) -> None:
    class Part(base):  # type: ignore[valid-type, misc]
        """Do nothing."""

    Part.__abstractmethods__ = frozenset()
    register("does-nothing")(Part)
    assert methods()["does-nothing"].parts == (base.__name__.lower(),)
    assert methods()["does-nothing"].options is Options


@pytest.mark.usefixtures("own")
def test_options_come_from_the_nearest_class_that_names_them() -> None:
    class MoreOptions(FedAvgOptions):
        more: int = 1
        """more"""

    class Plain(FedAvgServer):
        """Averages."""

    class Parametrized(FedAvgServer[MoreOptions]):
        """Averages."""

    class Annotated(FedAvgServer):
        """Averages."""

        options: MoreOptions

    class Below(Parametrized):
        """Averages."""

    for part in (Parametrized, Annotated, Below):
        register("averages")(part)
        assert methods()["averages"].options is MoreOptions
    register("averages")(Plain)
    assert methods()["averages"].options is FedAvgOptions


@pytest.mark.usefixtures("own")
def test_misuse_of_the_decorator_is_one_sentence() -> None:
    class Documented(Client[Options]):
        """Train."""

    class Silent(Client[Options]):
        pass

    class Unfinished(Server[Options]):
        """Average."""

        def models(self) -> Tensor:
            raise NotImplementedError

    for name, part, sentence in [
        ("mine", Silent, r"^Silent needs a docstring: its first line is the summary of the method 'mine'\.$"),
        ("mine", Options, r"^Options cannot be the method 'mine': derive it from Server, Client, Extras or Refiner\.$"),
        ("mine", print, r"^print cannot be the method 'mine': derive it"),
        ("mine", Unfinished, r"^Unfinished .* it does not define aggregate, dispatch, global_model\.$"),
        ("a+b", Documented, "letters, digits"),
        ("fedprox", Documented, "already a method 'fedprox'"),
    ]:
        with pytest.raises(InputError, match=sentence):
            register(name)(part)
    with pytest.raises(InputError, match=r'write @register\("my-method"\) above the class'):
        register(Documented)
    assert "mine" not in methods()


@pytest.mark.usefixtures("own")
def test_a_cell_that_runs_again_replaces_the_method_but_not_another_part() -> None:
    for summary in ("First.", "Second."):

        @register("again")
        class AgainClient(Client[Options]):
            __doc__ = summary

    assert methods()["again"].summary == "Second"

    class AgainServer(FedAvgServer):
        """Average."""

    with pytest.raises(InputError, match=r"'again' is already the method of AgainClient\. Give AgainServer another"):
        register("again")(AgainServer)


def test_a_cell_of_a_notebook_runs_in_worker_processes(tmp_path: Path) -> None:
    """A program without a file, as a notebook is one: its classes have no source that a worker could import."""
    cell = f"""
import fedloom
from pydantic import Field

for scale in (0.0, 0.5):
    class ScaleOptions(fedloom.Options):
        by: float = Field(scale, description="size")

    @fedloom.register("scale")
    class ScaleClient(fedloom.Client[ScaleOptions]):
        "Scale the gradient."
        def adjust_gradient(self, trainer):
            trainer.gradient.mul_(1 + self.options.by)

    settings = dict(rounds=1, clients=4, model="logreg", engine="multiprocess", workers=2, report=False)
    print(fedloom.run("scale", out=r"{tmp_path}/" + str(scale), **settings).digest)
"""
    done = subprocess.run([sys.executable, "-"], input=cell, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first != second


def test_a_package_names_a_class_or_a_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: None) -> None:
    for name in ("as_class", "as_module"):
        (tmp_path / f"{name}.py").write_text(
            "from fedloom import Client, Options, register\n"
            f'@register("{name}")\nclass PackagedClient(Client[Options]):\n    """Train."""\n'
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    values = ("as_class:PackagedClient", "as_module")
    points = [EntryPoint(value, value, "fedloom.methods") for value in values]
    monkeypatch.setattr(registry, "_installed", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert {"as_class", "as_module"} <= methods().keys()
