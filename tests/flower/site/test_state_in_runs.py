"""Tests that client states stay at their site and survive a restart."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.cli.catalog import read_catalog_entries
from fedloom.config import Config, replace_config
from fedloom.flower.message import SiteMessage
from fedloom.flower.site import handlers
from fedloom.flower.site.handlers import SiteHandler
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from fedloom.utils.storage import read_safetensors
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach

NORMED = {"model": "cnn:norm=batch"}
MOMENTUM = {"keep_optimizer": True, "momentum": 0.9}
ADAM = {"@optimizer mean", "@optimizer square", "@optimizer steps"}
KEEPING: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "scaffold": ("scaffold", {}, {"c"}),
    "feddyn": ("feddyn", {}, {"g"}),
    "moon": ("moon", {}, {"previous"}),
    "fedbn": ("fedbn", NORMED, {"@personal"}),
    "fedrep": ("fedrep", {"options": {"fedrep": {"head_epochs": 1, "final_epochs": 1}}}, {"@personal"}),
    "fedbabu": ("fedbabu", {"options": {"fedbabu": {"finetune_epochs": 1}}}, {"@personal"}),
    "momentum": ("fedavg", MOMENTUM, {"@optimizer velocity"}),
    "adam": ("fedavg", {"keep_optimizer": True, "optimizer": "adam", "lr": 0.001}, ADAM),
}
"""What runs of the table in docs/deploy.md keep, by name: method, settings, tensors."""
SENT_BY_ITSELF = {"scaffold": {0}, "moon": {0, 1, 2}}
"""Rounds in which a client's own answer must hold what it keeps: the first change of SCAFFOLD's c_k, which is zero at
first, is c_k; and MOON's client keeps the model that it sends."""
ROUNDS = 3


def make(name: str) -> Config:
    method, settings, _ = KEEPING[name]
    usual = {"clients": 3, "clients_per_round": 3, "rounds": ROUNDS, "batch_size": 32}
    return make_run(method=method, **{**usual, **settings})


class Watched(FakeLink):
    """Notes what clients keep, and may throw all sites away and make them anew whenever the server turns to them."""

    def __init__(self, config: Config, folder: Path, restarts: bool) -> None:
        super().__init__(make_sites(config, folder))
        self.config, self.folder, self.restarts = config, folder, restarts
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        """By round and client: what it has staged."""
        self.made = 1
        self._now: tuple[str, int] | None = None

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        now = question.kind, question.header["round"]
        if self.restarts and question.kind != "hello" and now != self._now:
            handlers._last.clear()  # network and bench of the old processes are gone with them
            before = self.sites
            self.sites = make_sites(self.config, self.folder)
            assert all(self.sites[node].name == site.name for node, site in before.items()), "the same folder"
            self.made += 1
        self._now = now
        ticket = super().send(node, question, seconds)
        if question.kind == "train":
            state = self._folder(node, question) / f"{question.header['nonce']}.safetensors"
            self.kept[question.header["round"], question.header["client_id"]] = read_safetensors(state)
        return ticket

    def _folder(self, node: int, question: SiteMessage) -> Path:
        return Path(self.sites[node].folder, question.header["run"], f"client-{question.header['client_id']}")


def play(name: str, folder: Path, *, restarts: bool) -> tuple[RunResult, Watched]:
    folder.mkdir()
    config, out = make(name), folder / "run"
    link = Watched(config, folder, restarts)
    run = execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out))
    assert run.summary["failed"] == 0, run.history[-1]["failed_clients"]
    return run, link


def test_all_methods_that_keep_something_are_here() -> None:
    keeping = {entry["name"] for entry in read_catalog_entries("methods") if entry["client state"] != "nothing"}
    keeping.discard("local")  # it does not run over sites
    assert keeping == {method for method, settings, _ in KEEPING.values() if "keep_optimizer" not in settings}


@pytest.mark.quick_if(name=("fedrep", "scaffold"))
@pytest.mark.parametrize("name", KEEPING)
def test_it_survives_restarts_of_all_sites(name: str, tmp_path: Path) -> None:
    whole, there = play(name, tmp_path / "whole", restarts=False)
    run, anew = play(name, tmp_path / "restarted", restarts=True)
    assert anew.made > ROUNDS >= there.made
    assert run.digest == whole.digest
    plain = execute_run(
        resolve_run(replace_config(make(name), engine="sequential")), out=tmp_path / "plain", report=False
    )
    if (
        "@personal" not in KEEPING[name][2]
    ):  # else the sequential engine's model has the mean of the clients' own columns
        assert run.digest == plain.digest
    names = ("train_loss", "personal_accuracy_mean", "personal_accuracy_worst10")
    told = [[[record.get(key) for key in names] for record in each.history] for each in (run, whole, plain)]
    assert told[0] == told[1] == told[2]
    assert anew.kept.keys() == there.kept.keys() == {(round, client) for round in range(ROUNDS) for client in range(3)}
    for key, state in there.kept.items():
        assert state.keys() == anew.kept[key].keys() == KEEPING[name][2]
        assert all(torch.equal(tensor, anew.kept[key][each]) for each, tensor in state.items())


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "moon", "fedbn", "momentum"])
def test_without_its_folder_it_would_be_lost(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above sees is not the memory of a process that goes on."""
    whole, _ = play(name, tmp_path / "whole", restarts=False)

    def forgotten(site: SiteHandler, question: SiteMessage) -> tuple[dict[str, Tensor], bool]:
        shapes, dtype = site.context.client.state_shapes, site.layout.dtype
        return {each: torch.zeros(shape, dtype=dtype) for each, shape in shapes.items()}, True

    monkeypatch.setattr(SiteHandler, "_client_state", forgotten)
    run, _ = play(name, tmp_path / "forgotten", restarts=True)
    assert run.history[1]["train_loss"] == whole.history[1]["train_loss"]
    assert run.history[2]["train_loss"] != whole.history[2]["train_loss"]


def pieces(tensors: Iterable[Tensor]) -> set[bytes]:
    """Sixteen bytes from many places, with enough in them not to be met by chance."""
    found = set()
    for tensor in tensors:
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found |= {content[at : at + 16] for at in range(0, len(content) - 16, max(16, len(content) // 64 // 4 * 4))}
    return {piece for piece in found if len(set(piece)) > 10}


def hold(parcels: Iterable[SiteMessage], searched: set[bytes]) -> bool:
    """Whether any of these is in any block."""
    contents = [bytes(block.data) for parcel in parcels for block in parcel.arrays.values()]
    return any(piece in content for piece in searched for content in set(contents))


@pytest.mark.quick_if(name=("fedrep", "scaffold"))
@pytest.mark.parametrize("name", [name for name in KEEPING if name != "fedbabu"])
def test_the_server_never_has_it(name: str, tmp_path: Path) -> None:
    """FedBABU's is the initial head, which nobody trains: there is nothing to hide, and it does not travel either."""
    _, link = play(name, tmp_path / "run", restarts=False)
    started_from = {
        (p.header["round"], p.header["client_id"]): bytes(p.arrays["model"].data)
        for p in link.asked
        if p.kind == "train"
    }
    for (round, client), state in link.kept.items():
        came = started_from[round, client]  # training leaves numbers of dead units as they came
        searched = {piece for piece in pieces(state.values()) if piece not in came}
        assert len(searched) >= 3, f"round {round}, client {client}: too little to search for"
        assert not hold(link.asked, searched), f"round {round}, client {client}: it was in a question"
        answers = [p for p in link.answered if p.header.get("client_id") == client and p.kind == "trained"]
        assert len(answers) == ROUNDS
        must = round in SENT_BY_ITSELF.get(name, ())
        for answer in answers:
            mine = must and answer.header["round"] == round
            assert hold([answer], searched) == mine, f"round {round}, client {client}, answer {answer.header['round']}"
        others = [p for p in link.answered if p not in answers]
        assert not hold(others, searched)
