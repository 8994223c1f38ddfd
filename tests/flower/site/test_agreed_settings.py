"""Tests that a site serves agreed settings only.

For other settings it does not read its data.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedloom.config import Config, replace_config
from fedloom.errors import FedloomError
from fedloom.flower.app import make_app_run_config, write_app
from fedloom.flower.message import SiteMessage
from fedloom.flower.server.client_registry import LOG, ClientRegistry
from fedloom.flower.site.handlers import HANDLERS, SiteHandler
from fedloom.flower.trust.agreement import (
    NAMES,
    agreement_fingerprint,
    agreement_settings,
    agreement_settings_from_app,
    format_agreement,
)
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from tests.support.fake_nodes import Town
from tests.support.fake_nodes import site as greeting
from tests.support.fake_transport import FakeLink, flat, make_run, make_sites, reach
from tests.support.secure_exchange_runs import federate, nodes, on_host, run_of


def agreement(config: Config, folder: Path) -> str:
    """The file that the command writes for an app of this run."""
    write_app(folder / "written", config)
    path = folder / "agreed.json"
    path.write_text(format_agreement(agreement_settings_from_app(folder / "written")))
    return str(path)


def test_a_run_with_the_settings_agreed_on_is_served(certificates: Path, tmp_path: Path) -> None:
    config = run_of(clients=3, clients_per_round=3, rounds=2)
    finished, link = federate(config, certificates, tmp_path, agreed=agreement(config, tmp_path))
    assert finished.history[-1]["failed"] == 0
    assert finished.digest == on_host(config, tmp_path).digest
    for site in link.sites.values():
        assert not list(site.folder.glob("settings-*.json"))  # its operator has them


def test_ordinary_training_is_agreed_on_too(tmp_path: Path) -> None:
    config, out = make_run(clients=2, clients_per_round=2, rounds=1), tmp_path / "run"
    hashed = agreement_fingerprint(agreement_settings(config))
    link = FakeLink(make_sites(config, tmp_path, [{"client": k, "agreed": hashed} for k in range(2)]))
    assert execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out)).history[-1]["failed"] == 0
    other, out = make_run(clients=2, clients_per_round=2, rounds=1, lr=0.3), tmp_path / "other"
    link = FakeLink(make_sites(other, tmp_path, [{"client": k, "agreed": hashed} for k in range(2)]))
    with pytest.raises(FedloomError, match=r"no site could be used: its operator agreed to settings whose fingerpri"):
        execute_run(
            resolve_run(other), out=out, remote_engine=reach(link, other, out, join=60.0)
        )  # but nobody waits for a minute


def test_a_run_goes_on_without_a_site_that_agreed_to_something_else(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    agreed = run_of(clients=4, clients_per_round=4, rounds=2)
    config, out = run_of(clients=4, clients_per_round=4, rounds=2, weight_decay=20.0), tmp_path / "run"
    configured = nodes(certificates, 4)
    configured[1]["agreed"] = agreement(agreed, tmp_path)
    link = FakeLink(make_sites(config, tmp_path, configured))
    words = "its operator agreed to weight_decay 0.0, and this run has weight_decay 20.0"
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, LOG.name):
        finished = execute_run(resolve_run(config), out=out, remote_engine=reach(link, config, out, join=60.0))
    assert time.monotonic() - begun < 50
    assert f"node 101 cannot be used: {words}" in caplog.text
    assert finished.history[-1]["failed_clients"] == {"1": f"its site is not connected, or cannot be used: {words}"}
    assert not any(p.header["client_id"] == 1 for p in link.answered if p.kind != "failed")
    refused = link.sites[101]
    [shown] = refused.folder.glob("settings-*.json")
    assert json.loads(shown.read_text())["weight_decay"] == 20.0
    said = capfd.readouterr().err
    assert said.count(f"rejected: {words}. All settings of that run are in {shown}.") == 1
    # And they are what its operator can agree to.
    again = SiteHandler(
        refused.run_config, {**refused.node_config, "agreed": str(shown)}, refused.app_folder, refused.folder
    )
    assert again.handle(question("hello", client_id=-1)).kind == "hello"


def question(kind: str, **more: Any) -> SiteMessage:
    header = {"run": "ab" * 16, "round": 0, "client_id": 0, "nonce": "cd" * 16, "model_index": 0, "attempt": 0}
    return SiteMessage(kind, {**header, **more})


LOADS = """
from fedloom.flower.site_data import SiteDataSpec

TASK = SiteDataSpec(classes=3, shape=(4,), name="flowers")


def load(node, client):
    raise RuntimeError("the data were touched")
"""


@pytest.mark.parametrize("kind", ["hello", "train", "evaluate", "mix/train"])
def test_no_question_makes_a_site_touch_its_data(certificates: Path, tmp_path: Path, kind: str) -> None:
    """Nor does it train: with the settings agreed on it would read its data first, and does."""
    write_app(tmp_path / "app", run_of())
    (tmp_path / "app" / "site_data.py").write_text(LOADS)
    config = flat(make_app_run_config(run_of(), []))
    (tmp_path / "agreed.json").write_text(format_agreement(agreement_settings_from_app(tmp_path / "app")))
    [node] = nodes(certificates, 1, agreed=str(tmp_path / "agreed.json"))
    site = SiteHandler({**config, "lr": 0.4}, node, tmp_path / "app", tmp_path / "site")
    answer = site.handle(question(kind))
    assert answer.kind == "failed"
    assert answer.header["reason"] == "its operator agreed to lr 0.05, and this run has lr 0.4"
    assert answer.header["permanent"] is True
    assert (
        "the data were touched"
        in SiteHandler(config, node, site.app_folder, site.folder).handle(question(kind)).header["reason"]
    )


def test_no_stage_of_the_exchange_is_answered(certificates: Path, tmp_path: Path) -> None:
    site = make_sites(run_of(), tmp_path, nodes(certificates, 1, agreed="0" * 64))[100]
    assert {"mix/hello", "mix/release", "train", "hello"} <= HANDLERS.keys()
    for kind in HANDLERS:
        assert site.handle(question(kind)).kind == "failed", kind
    assert not hasattr(site, "context")


NUMBERS = st.floats(1e-30, 1e6)
SINGLE: dict[str, st.SearchStrategy[Any]] = {
    "augment": st.just("flip"),
    "batch_size": st.integers(1, 999),
    "channels_last": st.booleans(),
    "classes": st.just("0-4"),
    "client_test": st.floats(1e-9, 0.9),
    "clients": st.integers(6, 99),
    "clip": NUMBERS,
    "clip_update": NUMBERS,
    "data": st.sampled_from(["mnist", "flowers"]),
    "epochs": st.integers(2, 99),
    "eval_every": st.integers(2, 99),
    "fast": st.just(True),
    "failure_rate": st.floats(1e-9, 0.9),
    "lr": NUMBERS,
    "lr_decay": st.floats(1e-9, 0.999),
    "lr_schedule": st.just("cosine"),
    "lr_warmup": st.just(1),
    "method": st.just("fedprox+fedcross"),
    "min_clients": st.integers(1, 5),
    "model": st.sampled_from(["cnn", "linear"]),
    "momentum": st.floats(1e-9, 0.9),
    "normalize": st.sampled_from(["unit", "half"]),
    "optimizer": st.just("adam"),
    "partition": st.sampled_from(["iid", "dirichlet:0.51"]),
    "clients_per_round": st.integers(1, 4),
    "precision": st.just("fp32"),
    "rounds": st.integers(4, 99),
    "seed": st.integers(2, 2**62),
    "server_data": st.just("split:0.1"),
    "statistics": st.just("estimated"),
    "steps": st.integers(1, 99),
    "validation": st.floats(1e-9, 0.9),
    "weight_decay": NUMBERS,
    "options.fedprox.mu": NUMBERS,
}
"""Values of settings that may change alone, other than those agreed on."""
NOISE = {"clip_update": 1.0, "noise": 0.5}
TOGETHER: dict[str, dict[str, Any]] = {
    "noise": NOISE,
    "noise_source": {**NOISE, "noise_source": "system"},
    "delta": {**NOISE, "delta": 0.01},
    "max_epsilon": {**NOISE, "max_epsilon": 3.0},
    "keep_optimizer": {"momentum": 0.5, "keep_optimizer": True},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "lr_step": {"lr_decay": 0.5, "lr_step": 2},
    "init": {"init": "/nowhere/a", "init_sha256": "ab" * 32},
    "init_sha256": {"init": "/nowhere/a", "init_sha256": "ab" * 32},
    "new_head": {"init": "/nowhere/a", "init_sha256": "ab" * 32, "new_head": True},
    "partition_sha256": {"partition": "file:/nowhere/b", "partition_sha256": "ab" * 32},
}
"""Settings that need others beside them."""


def test_the_tables_name_every_setting() -> None:
    names = {name for name in SINGLE if not name.startswith("options.")}
    refused = {"held_out_clients"}  # over sites
    assert names | TOGETHER.keys() | {"options"} | refused == NAMES


RUN = make_run(method="fedprox", options={"fedprox": {"mu": 1e-31}}, seed=1)


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> SiteHandler:
    """A site that is not built yet, whose operator agreed to what it is told."""
    folder = tmp_path_factory.mktemp("agreeing")
    return make_sites(RUN, folder, [{"client": 0, "agreed": agreement(RUN, folder)}])[100]


def refusal(site: SiteHandler, changes: dict[str, Any], **node: Any) -> str:
    """Why the site serves no run with these settings changed; it does not look at its data for that."""
    changed = SiteHandler({**site.run_config, **changes}, {**site.node_config, **node}, site.app_folder, site.folder)
    answer = changed.handle(question("train"))
    assert answer.header.get("permanent") is True, answer.header
    assert not hasattr(changed, "context")
    return str(answer.header["reason"])


@pytest.mark.parametrize("name", sorted(SINGLE))
@given(data=st.data())
@settings(max_examples=5)
def test_no_setting_can_change_unnoticed(agreeing: SiteHandler, name: str, data: st.DataObject) -> None:
    value = data.draw(SINGLE[name])
    assume(value != agreement_settings(RUN).get(name))
    shown, text = name.removeprefix("options."), json.dumps(value)
    agreed, found = refusal(agreeing, {name: value}).split(", and this run has ")
    assert shown in agreed
    assert found == f"{shown} {text if len(text) <= 24 else text[:21] + '...'}"


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_no_setting_that_needs_another_can_change_unnoticed(agreeing: SiteHandler, tmp_path: Path, name: str) -> None:
    told = agreement_settings(replace_config(RUN, **TOGETHER[name]))
    before = {**told, name: agreement_settings(RUN)[name]}
    (tmp_path / "agreed.json").write_text(format_agreement(before))
    agreed, found = refusal(agreeing, TOGETHER[name], agreed=str(tmp_path / "agreed.json")).split(", and this run has ")
    assert agreed == f"its operator agreed to {name} {json.dumps(before[name])}"
    assert found.startswith(f"{name} {json.dumps(told[name])[:21]}")


def test_settings_of_the_machine_may_change(agreeing: SiteHandler) -> None:
    changed = SiteHandler(
        {**agreeing.run_config, "deadline": 7.0, "workers": 2},
        agreeing.node_config,
        agreeing.app_folder,
        agreeing.folder,
    )
    assert changed.handle(question("hello", client_id=-1)).kind == "hello"


@pytest.mark.parametrize("word", ["nowhere.json", "empty.json"])
def test_an_agreement_that_cannot_be_read_is_no_agreement(tmp_path: Path, word: str) -> None:
    (tmp_path / "empty.json").touch()
    site = make_sites(make_run(), tmp_path, [{"client": 0, "agreed": str(tmp_path / word)}])[100]
    answer = site.handle(question("hello", client_id=-1))
    assert answer.kind == "failed"
    assert word in answer.header["reason"]
    assert not hasattr(site, "context")


def test_without_an_agreement_nothing_is_written(tmp_path: Path) -> None:
    site = make_sites(make_run(), tmp_path, [{"client": 0}])[100]
    assert site.handle(question("hello", client_id=-1)).kind == "hello"
    assert not list(site.folder.glob("settings-*.json"))


def test_nobody_waits_for_sites_that_will_not_come() -> None:
    unwilling = {"reason": "its operator agreed to lr 1, and this run has lr 2", "permanent": True}
    roster, begun = ClientRegistry(2), time.monotonic()
    roster.join(Town(n7=greeting("a", 0), n8=unwilling), 30)
    assert time.monotonic() - begun < 10
    assert roster.missing_client_ids() == [1]
    town = Town(n7=greeting("a", 0), n8={k: v for k, v in unwilling.items() if k != "permanent"})
    roster, begun = ClientRegistry(2), time.monotonic()
    roster.join(town, 0.5)
    assert time.monotonic() - begun >= 0.5  # what is the matter may pass


def test_a_site_whose_operator_agrees_after_all_is_used() -> None:
    unwilling = {"reason": "its operator agreed to lr 1, and this run has lr 2", "permanent": True}
    town, roster = Town(n7=greeting("a", 0), n8=unwilling), ClientRegistry(2)
    roster.join(town, 0.01)
    town = Town(n7=greeting("a", 0), n9=greeting("b", 1))
    roster.join(town, 5)
    assert not roster.missing_client_ids()
