"""Tests that Flower runs reach the secure exchange by its hooks only."""

import ast
from pathlib import Path
from typing import Any

import pytest

from fedloom import flower
from fedloom.config import replace_config
from fedloom.errors import InputError
from fedloom.flower.server import engine
from fedloom.flower.site import handlers
from fedloom.methods.fedmr import FedMROptions, FedMRServer
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS
from fedloom.runs.build import build_run
from fedloom.runs.resolve import resolve_run
from tests.support.fake_transport import make_run

EXCHANGE = "fedloom.flower.secure_recombination"


def imported(path: Path) -> set[str]:
    """The modules of the exchange that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith(EXCHANGE)}


def test_only_the_hooks_lead_to_the_exchange() -> None:
    folder = Path(flower.__file__).parent / "secure_recombination"
    assert imported(folder / "server.py"), "the search finds imports"
    for path in folder.parent.parent.rglob("*.py"):
        if path.parent != folder:
            assert not imported(path), path
    assert engine.EXCHANGE == "fedloom.flower.secure_recombination.server"
    assert handlers.EXTENSIONS == ("fedloom.flower.secure_recombination.site",)


class MyOptions(FedMROptions):
    """FedMR's, with another name before them."""


class MyServer(FedMRServer):
    """FedMR with something of its own."""


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({"method": "fedavg", "options": {}}, False),
        ({"options": {"fedmr": {"mixed": True}}}, False),
        ({"options": {"fedmr": {"secure": True}}}, True),
        ({"options": {"fedmr": {"secure": True, "first_stage": 2}}}, True),
        ({"options": {"fedmr": {"secure": True, "first_stage": 3}}}, False),
        ({"method": "fedprox+fedmr", "options": {"fedmr": {"secure": True}}}, True),
        ({"method": "mine-mixing", "options": {"mine-mixing": {"secure": True}}}, True),
    ],
)
def test_it_is_there_where_clients_exchange_layers_in_some_round(settings: dict[str, Any], there: bool) -> None:
    if settings.get("method") == "mine-mixing":
        mine = {"options": MyOptions, "server": MyServer, "defaults": MULTI_MODEL_DEFAULTS}
        register(Method("mine-mixing", "", "", **mine))
    config = make_run(**{"method": "fedmr", "rounds": 3, **settings})
    with build_run(resolve_run(replace_config(config, engine="sequential"))).engine_closed() as experiment:
        assert (engine.make_engine_exchange(resolve_run(config), experiment.engine.context) is not None) == there


def test_sites_exchange_before_they_upload_only() -> None:
    config = make_run(method="fedmr", rounds=3, options={"fedmr": {"secure": True, "exchange_before": "training"}})
    with (
        build_run(resolve_run(replace_config(config, engine="sequential"))).engine_closed() as experiment,
        pytest.raises(InputError, match="exchange_before=training is simulated by the other engines only"),
    ):
        engine.make_engine_exchange(resolve_run(config), experiment.engine.context)
