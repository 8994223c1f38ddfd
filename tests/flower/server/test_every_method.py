"""Tests that every method over sites gives the sequential engine's model."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.config import Config, replace_config
from fedloom.core.layout import Layout
from fedloom.flower.site.handlers import SiteHandler
from fedloom.methods import methods
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from fedloom.utils.storage import read_safetensors
from tests.support.core_methods import CORE_METHODS
from tests.support.fake_transport import FakeLink, make_run, make_sites, reach

QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 10, "check_every": 5},
    "fedbe": {"epochs": 2},
    "fedlaw": {"epochs": 2},
    "fedcda": {"warmup": 1},
    "lss": {"models": 2},
    "dynafed": {"L": 2, "s": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1, "refine_epochs": 1},
    "fedasam-swa": {"start": 0.0, "cycle": 1},
    "fedrep": {"head_epochs": 2, "final_epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "fedgen": {"steps": 10},
}
"""Options that save time, or let a method do in two rounds what it does later."""
SAID_ALIKE = ("train_loss", "bytes_down", "bytes_up", "failed", "personal_accuracy_mean", "personal_accuracy_worst10")
"""What the records of both must say, whatever the server knows of the clients' own columns."""
UNKNOWN_TO_THE_SERVER = ("fedrep", "fedbn with batch norms")
"""Where clients train columns that never travel, a server of real sites has the initial ones: docs/deploy.md."""
NORMED = "cnn:norm=batch"


def make(method: str, **settings: Any) -> Config:
    options = {method: QUICK[method]} if method in QUICK else {}
    usual = {"clients": 4, "clients_per_round": 3, "rounds": 2, "batch_size": 32}
    return make_run(method=method, options=options, **{**usual, **settings})


def both(config: Config, folder: Path) -> tuple[RunResult, RunResult, FakeLink]:
    """The run over sites, the plain one, and the link of the first."""
    link, out = FakeLink(make_sites(config, folder)), folder / "flower"
    run = execute_run(resolve_run(config), out=out, report=False, remote_engine=reach(link, config, out))
    plain = execute_run(
        resolve_run(replace_config(config, engine="sequential")), out=folder / "sequential", report=False
    )
    assert run.summary["failed"] == 0
    assert len(run.history) == len(plain.history) == 1 + config.rounds
    return run, plain, link


def said(run: RunResult, *names: str) -> list[list[Any]]:
    return [[record.get(name) for name in names] for record in run.history]


@pytest.mark.quick_if(method=CORE_METHODS)
@pytest.mark.parametrize(
    "method", sorted(name for name in set(methods()) - set(UNKNOWN_TO_THE_SERVER) if not methods()[name].bracket)
)
def test_a_method_gives_the_same_bits_over_sites(method: str, tmp_path: Path) -> None:
    """Three of four clients in a round, so that some come later than others."""
    run, plain, link = both(make(method), tmp_path)
    assert run.digest == plain.digest
    assert said(run, "accuracy", "loss", *SAID_ALIKE) == said(plain, "accuracy", "loss", *SAID_ALIKE)
    trained = [p.header["client_id"] for p in link.asked if p.kind == "train"]
    assert trained, "the clients were asked over the link"
    assert all(link.sites[100 + client].client_ids == (client,) for client in trained)


@pytest.mark.parametrize("method", sorted(name for name, each in methods().items() if each.server_data))
def test_no_site_has_what_the_server_holds(method: str, tmp_path: Path) -> None:
    config = make(method, server_data="split:100")
    run, plain, link = both(config, tmp_path)
    assert run.digest == plain.digest
    assert run.config.server_data == "split:100"
    (tmp_path / "without").mkdir()
    others = make_sites(make("fedavg"), tmp_path / "without")
    for site in others.values():
        site.build()
    assert samples_at(link.sites) == samples_at(others) - 100


def samples_at(sites: dict[int, SiteHandler]) -> int:
    return sum(site.context.data.num_examples(client) for site in sites.values() for client in site.client_ids)


@pytest.mark.parametrize("named", UNKNOWN_TO_THE_SERVER)
def test_where_clients_keep_columns_the_server_has_the_initial_ones(named: str, tmp_path: Path) -> None:
    """The rest has the same bits, and clients fare as they do with the sequential engine."""
    method, _, normed = named.partition(" with ")
    config = make(method, clients_per_round=4, **({"model": NORMED} if normed else {}))
    run, plain, link = both(config, tmp_path)
    assert said(run, *SAID_ALIKE) == said(plain, *SAID_ALIKE)
    assert run.history[-1]["personal_clients"] == plain.history[-1]["personal_clients"] == 4
    site = link.sites[100]
    ours, theirs = (read_safetensors(each.path / "model.safetensors") for each in (run, plain))
    initial, home = (
        site.layout.state_dict(site.initial),
        names_at_home(site.layout, site.context.client.personal_columns),
    )
    assert home
    assert home < ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], (initial if name in home else theirs)[name]), name
    assert any(not torch.equal(theirs[name], initial[name]) for name in home), (
        "the sequential engine knows the clients' own"
    )
    assert run.digest != plain.digest


def names_at_home(layout: Layout, stays_home: Sequence[slice]) -> set[str]:
    """The tensors that stay with the clients."""
    columns = set(chain.from_iterable(range(part.start, part.stop) for part in stays_home))
    return {entry.name for entry in layout.entries if entry.columns.start in columns}


def test_all_batch_norms_of_the_network_stay_at_home(tmp_path: Path) -> None:
    site = make_sites(make("fedbn", model=NORMED), tmp_path)[100]
    site.build()
    norms = {name for name, module in site.context.model.named_modules() if "BatchNorm" in type(module).__name__}
    assert norms
    kept = names_at_home(site.layout, site.context.client.personal_columns)
    assert kept == {entry.name for entry in site.layout.entries if entry.layer in norms}
